"""A process group over NCCL."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from typing_extensions import override

from ...contract.collective import Collective
from ...contract.deadline import Deadline
from ...contract.layout import flat, in_plain_order
from ...contract.process_group import ProcessGroup
from ...contract.reduce_op import Reduction
from ...contract.work import FinishedWork, Work
from ...errors import InvalidArgumentError
from ...failures.flight_recorder import FlightRecorder
from ...failures.report import Reporter, reported
from ...host.host_group import members_of
from . import algorithms
from .algorithms import Body
from .communicator import Communicator
from .connector import Connector, StreamCommunicator
from .datatypes import NativeReduction, native_reduction
from .engine import Engine
from .library import version_in_words
from .rendezvous import GroupRendezvous, Payload


class NcclGroup(ProcessGroup):
    """Collectives on the GPU of each rank.

    Note [Order over NCCL]
    ~~~~~~~~~~~~~~~~~~~~~~
    1. Every collective of the group runs on the group's one stream, in the order in which it was issued; a lock makes each
       issue one. It starts after all that the issuing thread's current stream held, so its tensors are ready.
    2. The call returns when the collective is on the stream. `wait` orders the current stream after it, and blocks the CPU
       only if it is given a timeout, and for a barrier. But where NCCL has to connect ranks first, the call waits for them: at
       the group's first collective, and at the first gather, scatter, all-to-all, and reduction in steps (see `datatypes`).
       Transfers between two ranks connect on a thread.
    3. A future is complete at once for the CPU. A callback runs on the thread that attaches it, before that thread issues
       anything else, on a stream that is ordered after the collective: so what it issues has the same place in the order on
       every rank, and it can wait without blocking anybody.
    4. `send` and `recv` have no place in that order: each direction between two ranks has a communicator and a stream of its
       own.

    The group serves the GPU of its first call. Its communicator is made then, out of the group that it was split from
    if that had one.

    All of it but `barrier`, and `wait` with a timeout, can be captured in a CUDA graph, once the group is connected, which the
    collectives before the capture do.

    What NCCL cannot reduce as the contract says is exchanged and reduced in rank order; see `datatypes`. Two differences are
    left to NCCL, as torch does, because they are what makes it fast: float16 and bfloat16 are rounded at each addition, and AVG
    multiplies by 1/size first. With `reproducible` both are as the contract says, at the price of copies of the tensor.

    Args:
        connector: how it is connected.
        stream_comm: its communicator, if it was split from another group's.
        reproducible: reduce in rank order whatever depends on the order.
    """

    def __init__(
        self,
        connector: Connector,
        *,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
        stream_comm: StreamCommunicator | None = None,
        reproducible: bool = False,
        owns_rendezvous: bool = True,
    ) -> None:
        super().__init__(connector.rank, len(connector.ranks), name=connector.name, timeout_s=timeout_s, ranks=ranks)
        self._connector = connector
        self._reproducible = reproducible
        self._owns_rendezvous = owns_rendezvous
        self._device_types = frozenset({connector.accelerator.device_type})
        self.recorder = FlightRecorder(self.name, self.rank, self.ranks)
        self._reporter: Reporter | None = None
        self._engine = Engine(
            connector,
            self.place,
            lambda: self.timeout_s,
            stream_comm,
            self.recorder,
            lambda e: reported(self._reporter, e),
            self._with_mark,
        )
        self._splits_made = itertools.count()
        self._subsets_made: Counter[tuple[str, tuple[int, ...]]] = Counter()

    @property
    def backend_name(self) -> str:
        """The name "nccl"."""
        return "nccl"

    @property
    def device_types(self) -> frozenset[str]:
        """Only CUDA."""
        return self._device_types

    def describe(self) -> str:
        """NCCL's version."""
        return f"nccl: NCCL {version_in_words(self._connector.nccl)} through CuPy"

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str | None = None) -> torch.Tensor:
        """Memory of torch's allocator, by default on the current GPU. CuPy (14) offers no way to register it with NCCL."""
        return super().allocate(numel, dtype, self._connector.accelerator.current_device() if device is None else device)

    def report_to(self, reporter: Reporter | None) -> None:
        """Let the failure of this group, and of groups made of it from now on, be reported; None: not."""
        self._reporter = reporter
        if reporter is not None:
            reporter.watch(self.recorder)

    @override
    def verify_calls(self, *, async_op: bool = False) -> Work | None:
        """As the base. With `async_op` nobody waits: see Note [Verification over NCCL] in `issued_calls`."""
        if async_op:
            self._engine.verify_calls_beside()
            return None
        self._engine.verify_calls()
        return FinishedWork([])

    # ---- after a loss ----

    @override
    def missing_for_shrink(self) -> str | None:
        rendezvous = self._connector.rendezvous
        if not self._owns_rendezvous:
            return "this group over NCCL is a part of another one; shrink that one, and make the part again"
        if rendezvous.group is None:
            return (
                "the ranks of this group over NCCL met in a store, where nobody finds out who is left; use a group of the host "
                "beside it, such as backend 'cpu:gloo,cuda:nccl' with init_method='file:///shared/folder'"
            )
        if not rendezvous.owns_group:
            return "this group over NCCL is one of several, for a device each; shrink the group of all devices"
        return rendezvous.group.missing_for_shrink()

    @property
    @override
    def members(self) -> tuple[int, ...]:
        host = self._connector.rendezvous.group if self._owns_rendezvous else None
        return super().members if host is None else host.members

    @override
    def meets_in(self, host: ProcessGroup) -> bool:
        return self._owns_rendezvous and self._connector.rendezvous.group is host

    @override
    def beside(self, host: ProcessGroup) -> NcclGroup:
        """Connected as at first: by NCCL when it is used. Nothing of the aborted communicators is used again."""
        before = self._connector
        rendezvous = GroupRendezvous(host, owned=before.rendezvous.owns_group)
        connector = Connector(before.nccl, before.accelerator, rendezvous, range(host.size), host.rank, self.name)
        made = NcclGroup(connector, timeout_s=self.timeout_s, reproducible=self._reproducible)
        made.report_to(self._reporter)
        return made

    @override
    def _shrink(self, silence_timeout_s: float) -> ProcessGroup:
        """The host group finds out who is left: NCCL only tells that something failed."""
        host = self._connector.rendezvous.group
        assert host is not None
        self._engine.abort()
        return self.beside(host.shrink(silence_timeout_s=silence_timeout_s))

    # ---- the end ----

    def close(self) -> None:
        """Compare calls, let the GPU finish, then give the communicators back.

        Raises:
            DisagreementError: the ranks have made different calls.
            TransportError: the group had failed, and nobody was told, so that what it delivered since is garbage; or what is in
                flight does not finish; or NCCL keeps a communicator, as it does while a CUDA graph with one of the group's
                collectives is alive.
        """
        try:
            self._engine.close()
        finally:
            if self._owns_rendezvous:
                self._connector.rendezvous.close()

    def abort(self) -> None:
        """End what is in flight, without waiting; see Note [Failure over NCCL] in `watchdog`."""
        self._engine.abort()
        if self._owns_rendezvous:
            self._connector.rendezvous.abort()

    def coalescing(self) -> AbstractContextManager[None]:
        """What this thread issues inside, with `async_op=True`, becomes one call of NCCL and one `Work`, which all return.

        Raises:
            MisuseError: one of them waits, or takes several steps (see `datatypes`), or contexts are nested.
        """
        return self._engine.coalescing()

    # ---- reductions ----

    def _all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        call = Collective("all_reduce", tensor, op)
        native = self._native(op, tensor)
        if native is None:
            body: Body = partial(algorithms.all_reduce_in_steps, tensor=tensor, op=op)
        else:
            body = partial(algorithms.all_reduce, tensor=tensor, native=native)
        return self._engine.issue(call, body, [tensor], async_op=async_op, in_steps=native is None)

    def _reduce(self, tensor: torch.Tensor, root: int, op: Reduction, async_op: bool) -> Work:
        call = Collective("reduce", tensor, op, root)
        native = self._native(op, tensor)
        if native is None:
            body: Body = partial(algorithms.reduce_in_steps, tensor=tensor, root=root, op=op)
        else:
            body = partial(algorithms.reduce, tensor=tensor, root=root, native=native)
        return self._engine.issue(call, body, [tensor], async_op=async_op, in_steps=native is None)

    def _reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: Reduction, async_op: bool) -> Work:
        call = Collective("reduce_scatter", output, op)
        return self._scatter_reduced(call, output, inputs, op, async_op)

    def _reduce_scatter_tensor(self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        call = Collective("reduce_scatter_tensor", output, op)
        return self._scatter_reduced(call, output, [tensor], op, async_op)

    def _scatter_reduced(
        self, call: Collective, output: torch.Tensor, inputs: list[torch.Tensor], op: Reduction, async_op: bool
    ) -> Work:
        native = self._native(op, output)

        def body(comm: Communicator) -> algorithms.Deliver | None:
            block = _in_one_block(inputs)
            if native is None:
                algorithms.reduce_scatter_in_steps(comm, output, block, op)
                return None
            return algorithms.reduce_scatter(comm, output, block, native)

        return self._engine.issue(call, body, [output], inputs, async_op=async_op, in_steps=native is None)

    # ---- moves ----

    def _broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Work:
        call = Collective("broadcast", tensor, root=root)
        return self._engine.issue(call, partial(algorithms.broadcast, tensor=tensor, root=root), [tensor], async_op=async_op)

    def _all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Work:
        call = Collective("all_gather", tensor)
        body = partial(algorithms.all_gather, outputs=outputs, tensor=tensor)
        return self._engine.issue(call, body, outputs, [tensor], async_op=async_op)

    def _all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool) -> Work:
        call = Collective("all_gather_into_tensor", tensor)
        body = partial(algorithms.all_gather_into_tensor, output=output, tensor=tensor)
        return self._engine.issue(call, body, [output], [tensor], async_op=async_op)

    def _gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, root: int, async_op: bool) -> Work:
        call = Collective("gather", tensor, root=root)
        body = partial(algorithms.gather, tensor=tensor, outputs=outputs, root=root)
        return self._engine.issue(call, body, outputs or [], [tensor], async_op=async_op)

    def _scatter(self, tensor: torch.Tensor, inputs: list[torch.Tensor] | None, root: int, async_op: bool) -> Work:
        call = Collective("scatter", tensor, root=root)
        body = partial(algorithms.scatter, tensor=tensor, inputs=inputs, root=root)
        return self._engine.issue(call, body, [tensor], inputs or [], async_op=async_op)

    def _all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], async_op: bool) -> Work:
        call = Collective("all_to_all", detail=f"dtype={inputs[0].dtype}")
        body = partial(algorithms.all_to_all, outputs=outputs, inputs=inputs)
        return self._engine.issue(call, body, outputs, inputs, async_op=async_op)

    def _all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: list[int], input_splits: list[int], async_op: bool
    ) -> Work:
        call = Collective("all_to_all_single", detail=f"dtype={tensor.dtype}, row={list(tensor.shape[1:])}")
        row = math.prod(tensor.shape[1:])
        body = partial(
            algorithms.all_to_all_single,
            output=output,
            tensor=tensor,
            received_counts=[rows * row for rows in output_splits],
            sent_counts=[rows * row for rows in input_splits],
        )
        return self._engine.issue(call, body, [output], [tensor], async_op=async_op)

    # ---- no tensor ----

    def _barrier(self, async_op: bool) -> Work:
        body = partial(algorithms.barrier, device=self._engine.device)
        work = self._engine.issue(Collective("barrier"), body, [], async_op=async_op, blocks=True)
        self.verify_calls(async_op=async_op)
        return work

    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None:
        number = next(self._splits_made)
        deadline = Deadline(self.timeout_s)
        said = self._connector.agree(f"split {number}", {"color": color, "key": key}, _all_said, deadline)
        members = None if color is None else members_of(color, said["all"])
        stream_comm = self._engine.split(members, color, deadline)
        if members is None:
            return None
        return self._part(
            self._connector.part(members, f"{self.name}/{number}.{color}"),
            [self.ranks[member] for member in members],
            timeout_s,
            stream_comm,
        )

    def _subset(self, members: list[int], name: str, timeout_s: float) -> ProcessGroup:
        """The members connect on their own, when they first need it; a name that comes again meets under another number."""
        asked = (name, tuple(members))
        self._subsets_made[asked] += 1
        return self._part(
            self._connector.part(members, f"{name}/{'-'.join(map(str, members))}.{self._subsets_made[asked]}"),
            [self.ranks[member] for member in members],
            timeout_s,
        )

    def _part(
        self, connector: Connector, ranks: Sequence[int], timeout_s: float, stream_comm: StreamCommunicator | None = None
    ) -> NcclGroup:
        made = NcclGroup(
            connector,
            timeout_s=timeout_s,
            ranks=ranks,
            stream_comm=stream_comm,
            reproducible=self._reproducible,
            owns_rendezvous=False,
        )
        made.report_to(self._reporter)
        return made

    # ---- two ranks ----

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work:
        call = Collective("send", tensor, detail=f"dst={dst}, tag={tag}")
        self._check_tag(call, tag)
        return self._transfer(call, partial(algorithms.send, tensor=tensor), tensor, (self.rank, dst), async_op)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work:
        call = Collective("recv", tensor, detail=f"src={'any' if src is None else src}, tag={tag}")
        self._check_tag(call, tag)
        if src is None:
            raise InvalidArgumentError(
                f"recv on {self.place()}: NCCL must know who sends; name the source, or receive on the CPU"
            )
        return self._transfer(call, partial(algorithms.recv, tensor=tensor), tensor, (src, self.rank), async_op)

    def _transfer(self, call: Collective, body: Body, tensor: torch.Tensor, direction: tuple[int, int], async_op: bool) -> Work:
        work = self._engine.transfer(call, body, tensor, direction)
        if not async_op:
            work.wait()
        return work

    def _check_tag(self, call: Collective, tag: int) -> None:
        if tag != 0:
            self._refuse_if(call.name, f"NCCL has no tags, found tag {tag}; transfers between two ranks arrive in order")

    # ---- shared ----

    def _native(self, op: Reduction, tensor: torch.Tensor) -> NativeReduction | None:
        return native_reduction(op, tensor.dtype, reproducible=self._reproducible)


def _all_said(words: list[Payload]) -> Payload:
    return {"all": [[entry["color"], entry["key"]] for entry in words]}


def _in_one_block(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    parts = [flat(in_plain_order(entry)) for entry in inputs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
