"""A process group made of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch

from ..contract import checks
from ..contract.call_observer import observers
from ..contract.collective import Collective
from ..contract.deadline import Deadline
from ..contract.layout import flat, in_plain_order
from ..contract.process_group import ProcessGroup
from ..contract.reduce_op import ReduceOp, Reduction
from ..contract.running_call import RunningCall
from ..contract.work import FinishedWork, Work
from ..torch_internals import profiler_runs
from .host_exchanges import HostExchanges
from .packing import copy_back, empty_block, flat_copy, unpack
from .runnable import KeptPlan, PlanKey
from .transport import CallKind, Plan

MOST_PLANS = 256


class HostGroup(HostExchanges):
    """All of `ProcessGroup` by the blocking collectives of a `Transport`; see `SerialGroup` for order and arguments."""

    # ---- memory ----

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """On the CPU, memory of the transport's; it has a place in the total order."""
        if torch.device(device).type != "cpu":
            return super().allocate(numel, dtype, device)
        self._refuse_if("allocate", checks.no_size(numel, dtype))
        call = Collective("allocate", detail=f"numel={numel}, dtype={dtype}")
        made: list[torch.Tensor] = []

        def body(running: RunningCall) -> None:
            with torch.inference_mode(False):  # what is made in that mode could not hold gradients
                made.append(self._transport.allocate(numel, dtype, running))

        self._issue(call, [], (), body, async_op=False)
        return made[0]

    # ---- one tensor on each rank ----

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, *, async_op: bool = False) -> Work:
        """As `ProcessGroup.all_reduce`.

        Note [Plans]
        ~~~~~~~~~~~~
        A transport may decide how it does calls of a kind (same collective, reduction, root, dtype and shape) at the first
        of them, and the group keeps the plan. For a blocking call that comes again with simple tensors, what was checked then
        holds (but for a block, which is looked at again), so `ran_at_once` runs the plan. Ranks may differ in whether they
        have kept a plan.
        """
        if not async_op and self.ran_at_once("all_reduce", op, None, tensor):
            return FinishedWork([tensor])
        return super().all_reduce(tensor, op, async_op=async_op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, async_op: bool = False) -> Work:
        """As `ProcessGroup.broadcast`; see Note [Plans]."""
        if not async_op and self.ran_at_once("broadcast", None, root, tensor):
            return FinishedWork([tensor])
        return super().broadcast(tensor, root, async_op=async_op)

    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False) -> Work:
        """As `ProcessGroup.all_gather_into_tensor`; see Note [Plans]."""
        if not async_op and self.ran_at_once("all_gather_into_tensor", None, None, tensor, output):
            return FinishedWork([output])
        return super().all_gather_into_tensor(output, tensor, async_op=async_op)

    def reduce_scatter_tensor(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, *, async_op: bool = False
    ) -> Work:
        """As `ProcessGroup.reduce_scatter_tensor`; see Note [Plans]."""
        if not async_op and self.ran_at_once("reduce_scatter_tensor", op, None, output, tensor):
            return FinishedWork([output])
        return super().reduce_scatter_tensor(output, tensor, op, async_op=async_op)

    def ran_at_once(
        self,
        name: str,
        op: Reduction | None,
        root: int | None,
        tensor: torch.Tensor,
        block: torch.Tensor | None = None,
    ) -> bool:
        """As `ProcessGroup.ran_at_once`: if a plan is kept for the call, and nothing has to be done but to run it."""
        if not self._plans:  # such as a transport's that has none
            return False
        if self._check_calls or observers or self._callbacks.running or profiler_runs() or not checks.is_simple(tensor):
            return False
        if self._marks:  # a plan does not know of them
            return False
        if type(op) is not ReduceOp and op is not None:
            return False
        shape = tensor.shape
        kept = self._plans.get((name, op, root, tensor.dtype, shape))  # a closed group has none
        if kept is None or (kept.is_complex and tensor.is_conj()):
            return False
        whole = tensor
        if kept.has_block:
            if not checks.is_simple_block(block, tensor, self.size, self.rank):
                return False
            whole = block
        if not self._progress.take_turn():
            return False
        try:
            self._callbacks.issued += 1  # nobody is inside a callback
            # The caller of the method or of the functional form is three frames up.
            self._run(kept, tensor, whole, self.recorder.issue_kind(next(self._sequence), kept.what, shape, 3))
        finally:
            self._progress.running_on = None
            self._progress.turn.release()
        return True

    def algorithm_of(self, name: str, tensor: torch.Tensor) -> str | None:
        """As `ProcessGroup.algorithm_of`: what the plan took that was made last."""
        for (planned, _, _, *like), kept in reversed(self._plans.items()):
            if [planned, *like] == [name, tensor.dtype, tensor.shape]:
                return kept.plan.algorithm
        return None

    def _plan(self, call: Collective, tensor: torch.Tensor) -> Plan | None:
        """The plan for calls like this one, whose tensor is `tensor`; None if the transport has none."""
        if not tensor.is_cpu:
            return None
        kind = CallKind(call.name, call.op, call.root, tensor.dtype, tensor.numel())
        key: PlanKey = (call.name, call.op, call.root, tensor.dtype, tensor.shape)
        kept = self._plans.get(key)
        if kept is not None:
            return kept.plan
        plan = self._transport.plan(kind)
        if plan is not None and not self._closed:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = KeptPlan(plan, kind)
        return plan

    def _all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        call = Collective("all_reduce", tensor, op)

        def body(running: RunningCall) -> None:
            wire = in_plain_order(tensor)
            plan = self._plan(call, wire)
            if plan is None:
                self._transport.all_reduce(flat(wire), op, running)
            else:
                plan.run(wire, wire, running.deadline)
            copy_back(wire, tensor)

        return self._issue(call, [tensor], (), body, async_op)

    def _reduce(self, tensor: torch.Tensor, root: int, op: Reduction, async_op: bool) -> Work:
        call = Collective("reduce", tensor, op, root)

        def body(running: RunningCall) -> None:
            wire = in_plain_order(tensor)
            self._transport.reduce(flat(wire), root, op, running)
            if self.rank == root:
                copy_back(wire, tensor)

        return self._issue(call, [tensor], (), body, async_op)

    def _broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Work:
        call = Collective("broadcast", tensor, root=root)

        def body(running: RunningCall) -> None:
            wire = in_plain_order(tensor)
            plan = self._plan(call, wire)
            if plan is None:
                self._transport.broadcast(flat(wire), root, running)
            else:
                plan.run(wire, wire, running.deadline)
            if self.rank != root:
                copy_back(wire, tensor)

        return self._issue(call, [tensor], (), body, async_op)

    # ---- one tensor on one side, one for each rank on the other ----

    def _all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Work:
        call = Collective("all_gather", tensor)

        def body(running: RunningCall) -> None:
            block = empty_block(tensor, self.size)
            self._run_all_gather(block, tensor, running)
            unpack(block, outputs)

        return self._issue(call, outputs, [tensor], body, async_op)

    def _all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool) -> Work:
        call = Collective("all_gather_into_tensor", tensor)

        def body(running: RunningCall) -> None:
            wire = in_plain_order(output)
            self._run_all_gather(wire, tensor, running)
            copy_back(wire, output)

        return self._issue(call, [output], [tensor], body, async_op)

    def _gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, root: int, async_op: bool) -> Work:
        call = Collective("gather", tensor, root=root)

        def body(running: RunningCall) -> None:
            block = None if outputs is None else empty_block(tensor, self.size)
            self._transport.gather(flat_copy(tensor), block, root, running)
            if outputs is not None and block is not None:
                unpack(block, outputs)

        return self._issue(call, outputs or [], [tensor], body, async_op)

    def _scatter(self, tensor: torch.Tensor, inputs: list[torch.Tensor] | None, root: int, async_op: bool) -> Work:
        call = Collective("scatter", tensor, root=root)

        def body(running: RunningCall) -> None:
            wire = in_plain_order(tensor)
            block = None if inputs is None else torch.cat([flat_copy(entry) for entry in inputs])
            self._transport.scatter(flat(wire), block, root, running)
            copy_back(wire, tensor)

        return self._issue(call, [tensor], inputs or (), body, async_op)

    def _reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: Reduction, async_op: bool) -> Work:
        call = Collective("reduce_scatter", output, op)

        def body(running: RunningCall) -> None:
            wire = in_plain_order(output)
            block = torch.cat([flat_copy(entry) for entry in inputs])
            self._run_reduce_scatter(wire, block, op, running)
            copy_back(wire, output)

        return self._issue(call, [output], inputs, body, async_op)

    def _reduce_scatter_tensor(self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        call = Collective("reduce_scatter_tensor", output, op)

        def body(running: RunningCall) -> None:
            wire = in_plain_order(output)
            self._run_reduce_scatter(wire, in_plain_order(tensor), op, running)
            copy_back(wire, output)

        return self._issue(call, [output], [tensor], body, async_op)

    def _run_all_gather(self, block: torch.Tensor, tensor: torch.Tensor, running: RunningCall) -> None:
        part = in_plain_order(tensor)
        plan = self._plan(running.collective, part)
        if plan is None:
            self._transport.all_gather(flat(block), flat(part), running)
        else:
            plan.run(part, block, running.deadline)

    def _run_reduce_scatter(self, part: torch.Tensor, block: torch.Tensor, op: Reduction, running: RunningCall) -> None:
        plan = self._plan(running.collective, part)
        if plan is None:
            self._transport.reduce_scatter(flat(part), flat(block), op, running)
        else:
            plan.run(part, block, running.deadline)

    # ---- no tensor ----

    def _barrier(self, async_op: bool) -> Work:
        call = Collective("barrier")

        def body(running: RunningCall) -> None:
            self._transport.barrier(running)
            if self._verification is not None:
                self._verification.verify(running.deadline)

        return self._issue(call, [], (), body, async_op)

    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None:
        call = Collective("split")
        made: list[HostGroup] = []

        def body(running: RunningCall) -> None:
            mine = torch.tensor([-1 if color is None else color, key], dtype=torch.int64, device="cpu")
            block = empty_block(mine, self.size)
            self._transport.all_gather(block, mine, running)
            number = next(self._splits_made)
            if color is None:
                return
            members = members_of(color, block.view(self.size, 2).tolist())
            made.append(self._part(members, f"{self.name}/{number}.{color}", number, timeout_s, running.deadline))

        self._issue(call, [], (), body, async_op=False)
        return made[0] if made else None

    def _subset(self, members: list[int], name: str, timeout_s: float) -> ProcessGroup:
        made: list[HostGroup] = []
        self._issue(
            Collective("subset", detail=f"members={members}"),
            [],
            (),
            lambda running: made.append(self._part(members, name, crc32(name.encode()), timeout_s, running.deadline)),
            async_op=False,
            is_numbered=False,
        )
        return made[0]

    def _part(self, members: list[int], name: str, number: int, timeout_s: float, deadline: Deadline) -> HostGroup:
        ranks = [self.ranks[member] for member in members]
        transport = self._transport.subset(members, name, number, deadline)
        rank = members.index(self.rank)
        liveness = self._liveness
        made = HostGroup(
            transport,
            rank,
            len(members),
            name=name,
            timeout_s=timeout_s,
            ranks=ranks,
            device=self._device,
            check_calls=self._check_calls,
            calls=None if self._calls is None else self._calls.part(name, members),
            liveness=None if liveness is None else liveness.part(members, rank, transport.lost_ranks),
        )
        made.report_to(self._reporter)
        made.warn_of_stalls(self._stall_warning_s)
        return made


def members_of(color: int, colors_and_keys: Sequence[Sequence[int]]) -> list[int]:
    """The ranks that gave a color, ordered by key, then by rank. A pure function."""
    chosen = [(key, rank) for rank, (given, key) in enumerate(colors_and_keys) if given == color]
    return [rank for _, rank in sorted(chosen)]
