"""A process group made of a transport: total order, futures, time limits and errors, once for all host backends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NoReturn
from zlib import crc32

import torch

from ..contract import checks
from ..contract.collective import Collective, different_calls
from ..contract.deadline import Deadline
from ..contract.layout import flat, in_plain_order, is_tracked, mark_written, untracked
from ..contract.process_group import ProcessGroup
from ..contract.reduce_op import ReduceOp, Reduction
from ..contract.work import FinishedWork, PendingWork, Work
from ..errors import CollectiveTimeout, GroupClosedError, MisuseError, SynclineError, TransportError
from .device_runtime import Body, DeviceLayer, StreamOrder
from .group_work import GroupWork
from .progress import Progress
from .transfer import TransferWork
from .transport import PreparedAllReduce, Transport

_CPU = frozenset({"cpu"})
_WORDS_BYTES = 512
_MOST_PREPARED = 256

# A library may go on writing to the tensors of a collective that was given up, so they must live as long as the process. The
# tracebacks of these errors hold the frames that hold them, also copies in plain order.
_given_up: list[BaseException] = []


class HostGroup(ProcessGroup):
    """Runs the blocking collectives of a `Transport` in one total order; see Note [One total order] in `progress`.

    A collective with `async_op=False` runs on the caller's thread when nothing is in flight (a hop to another thread costs
    more than a small collective), otherwise it is queued and waited for. `send` and `recv` have no place in that order: they
    start at once on the caller's thread. After a failed collective the transport's state is unknown, so every later one fails
    with a reference to the first failure.

    Args:
        transport: moves the tensors.
        device: of whose tensors, beside the host's, the transport takes (see `ByDevice`). Note [Order on the device] in
            `devices.layer` says how a collective fits among what the device does.
        check_calls: the ranks compare what they are about to do before each collective.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        size: int,
        *,
        name: str = "default",
        timeout_s: float,
        ranks: Sequence[int] | None = None,
        device: DeviceLayer | None = None,
        check_calls: bool = False,
    ) -> None:
        super().__init__(rank, size, name=name, timeout_s=timeout_s, ranks=ranks)
        self._transport = transport
        self._check_calls = check_calls
        self._device = device
        self._device_types = _CPU if device is None else _CPU | {device.device_type}
        self._progress = Progress(f"syncline-{name}-rank{rank}")
        self._sequence = itertools.count()
        self._splits_made = itertools.count()
        self._closed = False
        self._first_failure: BaseException | None = None
        self._in_flight: set[PendingWork] = set()
        self._prepared: dict[tuple[Reduction, torch.dtype, int], PreparedAllReduce] = {}
        self._deadline: Deadline | None = None  # of the collective that runs now

    @property
    def backend_name(self) -> str:
        """The transport's name in the registry."""
        return self._transport.backend_name

    @property
    def device_types(self) -> frozenset[str]:
        """The CPU, and the device that the group was made with."""
        return self._device_types

    def describe(self) -> str:
        """The transport's own description."""
        return self._transport.describe()

    def close(self) -> None:
        """Run what was issued, then close the transport.

        Raises:
            MisuseError: it was called from a future's callback, which is part of what it would wait for.
        """
        if self._progress.is_running_here():
            raise MisuseError(f"close on {self.place()} was called from a future's callback; call it after wait(), or abort()")
        if self._closed:
            return
        self._closed = True
        drained = self._progress.drain(self.timeout_s)
        self._prepared.clear()
        self._progress.stop()
        if drained and self._first_failure is None:
            self._transport.close()
        else:
            self._transport.abort()

    def abort(self) -> None:
        """Fail what is in flight and everything queued behind it."""
        if self._closed:
            return
        self._closed = True
        self._prepared.clear()
        failure = self._first_failure = self._first_failure or self._aborted()
        if self._deadline is not None:
            self._deadline.cancel()
        self._transport.abort()
        for work in list(self._in_flight):
            work.fail(failure)
        self._progress.stop()

    # ---- memory ----

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """On the CPU, memory of the transport's; it has a place in the total order."""
        if torch.device(device).type != "cpu":
            return super().allocate(numel, dtype, device)
        call = Collective("allocate", detail=f"numel={numel}, dtype={dtype}")
        made: list[torch.Tensor] = []

        def body(deadline: Deadline) -> None:
            with torch.inference_mode(False):  # what is made in that mode could not hold gradients
                made.append(self._transport.allocate(numel, dtype, call, deadline))

        self._issue(call, [], (), body, async_op=False)
        return made[0]

    # ---- one tensor on each rank ----

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, *, async_op: bool = False) -> Work:
        """As `ProcessGroup.all_reduce`.

        Note [Prepared calls]
        ~~~~~~~~~~~~~~~~~~~~~
        For a call like an earlier one (same number of elements, dtype and reduction) what was checked and decided then holds.
        What is left to ask is whether the tensor is simple; others take the usual way. Both ways are the same to the other
        ranks, and have the same place in the total order.
        """
        if not (async_op or self._check_calls or self._closed) and type(op) is ReduceOp and checks.is_simple(tensor):
            prepared = self._prepared.get((op, tensor.dtype, tensor.numel()))
            if prepared is not None and self._progress.run_here(self._run_prepared, prepared, tensor, op):
                return FinishedWork([tensor])
        return super().all_reduce(tensor, op, async_op=async_op)

    def _all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        call = Collective("all_reduce", tensor, op)

        def body(deadline: Deadline) -> None:
            prepared = self._prepared.get((op, tensor.dtype, tensor.numel())) if checks.is_simple(tensor) else None
            if prepared is not None:
                prepared(tensor, deadline)
                return
            wire = in_plain_order(tensor)
            self._transport.all_reduce(flat(wire), op, call, deadline)
            _copy_back(wire, tensor)
            mark_written(tensor)
            self._prepare(tensor, op, call)

        return self._issue(call, [tensor], (), body, async_op)

    def _prepare(self, tensor: torch.Tensor, op: Reduction, call: Collective) -> None:
        """For the next call of that kind."""
        key = op, tensor.dtype, tensor.numel()
        if self._closed or key in self._prepared:
            return
        prepared = self._transport.prepared_all_reduce(tensor, op, call)
        if prepared is not None:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            self._prepared[key] = prepared

    def _reduce(self, tensor: torch.Tensor, root: int, op: Reduction, async_op: bool) -> Work:
        call = Collective("reduce", tensor, op, root)

        def body(deadline: Deadline) -> None:
            wire = in_plain_order(tensor)
            self._transport.reduce(flat(wire), root, op, call, deadline)
            if self.rank == root:
                _copy_back(wire, tensor)

        return self._issue(call, [tensor], (), body, async_op)

    def _broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Work:
        call = Collective("broadcast", tensor, root=root)

        def body(deadline: Deadline) -> None:
            wire = in_plain_order(tensor)
            self._transport.broadcast(flat(wire), root, call, deadline)
            if self.rank != root:
                _copy_back(wire, tensor)

        return self._issue(call, [tensor], (), body, async_op)

    # ---- one tensor on one side, one for each rank on the other ----

    def _all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Work:
        call = Collective("all_gather", tensor)

        def body(deadline: Deadline) -> None:
            block = self._empty_block(tensor)
            self._transport.all_gather(block, _flat(tensor), call, deadline)
            self._unpack(block, outputs)

        return self._issue(call, outputs, [tensor], body, async_op)

    def _all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool) -> Work:
        call = Collective("all_gather_into_tensor", tensor)

        def body(deadline: Deadline) -> None:
            wire = in_plain_order(output)
            self._transport.all_gather(flat(wire), _flat(tensor), call, deadline)
            _copy_back(wire, output)

        return self._issue(call, [output], [tensor], body, async_op)

    def _gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, root: int, async_op: bool) -> Work:
        call = Collective("gather", tensor, root=root)

        def body(deadline: Deadline) -> None:
            block = None if outputs is None else self._empty_block(tensor)
            self._transport.gather(_flat(tensor), block, root, call, deadline)
            if outputs is not None and block is not None:
                self._unpack(block, outputs)

        return self._issue(call, outputs or [], [tensor], body, async_op)

    def _scatter(self, tensor: torch.Tensor, inputs: list[torch.Tensor] | None, root: int, async_op: bool) -> Work:
        call = Collective("scatter", tensor, root=root)

        def body(deadline: Deadline) -> None:
            wire = in_plain_order(tensor)
            block = None if inputs is None else torch.cat([_flat(entry) for entry in inputs])
            self._transport.scatter(flat(wire), block, root, call, deadline)
            _copy_back(wire, tensor)

        return self._issue(call, [tensor], inputs or (), body, async_op)

    def _reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: Reduction, async_op: bool) -> Work:
        call = Collective("reduce_scatter", output, op)

        def body(deadline: Deadline) -> None:
            wire = in_plain_order(output)
            block = torch.cat([_flat(entry) for entry in inputs])
            self._transport.reduce_scatter(flat(wire), block, op, call, deadline)
            _copy_back(wire, output)

        return self._issue(call, [output], inputs, body, async_op)

    def _reduce_scatter_tensor(self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        call = Collective("reduce_scatter_tensor", output, op)

        def body(deadline: Deadline) -> None:
            wire = in_plain_order(output)
            self._transport.reduce_scatter(flat(wire), _flat(tensor), op, call, deadline)
            _copy_back(wire, output)

        return self._issue(call, [output], [tensor], body, async_op)

    # ---- one tensor for each rank on both sides ----

    def _all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], async_op: bool) -> Work:
        call = Collective("all_to_all", detail=f"dtype={inputs[0].dtype}")

        def body(deadline: Deadline) -> None:
            counts = [entry.numel() for entry in outputs]
            received = torch.empty(sum(counts), dtype=inputs[0].dtype, device=inputs[0].device)
            packed = torch.cat([_flat(entry) for entry in inputs])
            self._transport.all_to_all(received, packed, counts, [entry.numel() for entry in inputs], call, deadline)
            for output, part in zip(outputs, torch.split(received, counts), strict=True):
                output.copy_(part.view(output.shape))

        return self._issue(call, outputs, inputs, body, async_op)

    def _all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: list[int], input_splits: list[int], async_op: bool
    ) -> Work:
        call = Collective("all_to_all_single", detail=f"dtype={tensor.dtype}, row={list(tensor.shape[1:])}")
        row = math.prod(tensor.shape[1:])

        def body(deadline: Deadline) -> None:
            wire = in_plain_order(output)
            counts = [rows * row for rows in output_splits]
            self._transport.all_to_all(flat(wire), _flat(tensor), counts, [n * row for n in input_splits], call, deadline)
            _copy_back(wire, output)

        return self._issue(call, [output], [tensor], body, async_op)

    # ---- no tensor ----

    def _barrier(self, async_op: bool) -> Work:
        call = Collective("barrier")
        return self._issue(call, [], (), lambda deadline: self._transport.barrier(call, deadline), async_op)

    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None:
        call = Collective("split")
        made: list[HostGroup] = []

        def body(deadline: Deadline) -> None:
            mine = torch.tensor([-1 if color is None else color, key], dtype=torch.int64, device="cpu")
            block = self._empty_block(mine)
            self._transport.all_gather(block, mine, call, deadline)
            number = next(self._splits_made)
            if color is None:
                return
            members = members_of(color, block.view(self.size, 2).tolist())
            made.append(self._part(members, f"{self.name}/{number}.{color}", number, timeout_s, deadline))

        self._issue(call, [], (), body, async_op=False)
        return made[0] if made else None

    def _subset(self, members: list[int], name: str, timeout_s: float) -> ProcessGroup:
        made: list[HostGroup] = []
        self._issue(
            Collective("subset", detail=f"members={members}"),
            [],
            (),
            lambda deadline: made.append(self._part(members, name, crc32(name.encode()), timeout_s, deadline)),
            async_op=False,
            is_numbered=False,
        )
        return made[0]

    def _part(self, members: list[int], name: str, number: int, timeout_s: float, deadline: Deadline) -> HostGroup:
        return HostGroup(
            self._transport.subset(members, name, number, deadline),
            members.index(self.rank),
            len(members),
            name=name,
            timeout_s=timeout_s,
            ranks=[self.ranks[member] for member in members],
            device=self._device,
            check_calls=self._check_calls,
        )

    # ---- two ranks ----

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work:
        call = Collective("send", tensor, detail=f"dst={dst}, tag={tag}")
        self._check_usable(call)
        wire = _flat(tensor)
        work = TransferWork(self._transport.start_send(wire, dst, tag), [tensor], lambda: None, self._transfer_in_words(call))
        return self._finish_now(work, async_op)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work:
        call = Collective("recv", tensor, detail=f"src={'any' if src is None else src}, tag={tag}")
        self._check_usable(call)
        wire = in_plain_order(tensor)
        request = self._transport.start_recv(flat(wire), src, tag)
        work = TransferWork(request, [tensor], lambda: _copy_back(wire, tensor), self._transfer_in_words(call))
        return self._finish_now(work, async_op)

    def _finish_now(self, work: Work, async_op: bool) -> Work:
        if not async_op:
            work.wait(self.timeout_s)
        return work

    def _transfer_in_words(self, call: Collective) -> Callable[[], str]:
        return lambda: f"{call.signature()} on {self.place()}"

    # ---- from a call to a running collective ----

    def _issue(
        self,
        call: Collective,
        outputs: list[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        body: Body,
        async_op: bool,
        *,
        is_numbered: bool = True,
    ) -> Work:
        """Run a collective here or queue it; those that not all ranks issue have no number.

        `outputs` and `inputs` together are all the tensors that the body touches.
        """
        self._check_open(call)
        sequence = next(self._sequence) if is_numbered else None
        tensors = (*outputs, *inputs)
        order = None if self._device is None else self._ordered_on(self._device, tensors)
        if order is not None:
            body = order.around(body)
        if not async_op and self._progress.run_here(self._run, call, sequence, body, tensors):
            if order is not None:
                order.join()
            return FinishedWork(outputs)
        work = GroupWork(outputs, lambda: self._in_words(call, sequence), self._progress, order)
        self._in_flight.add(work)
        is_short = self.size == 1 and order is None  # nobody to wait for, and another thread would take longer to wake up
        if is_short and self._progress.run_here(self._run_into, work, call, sequence, body, tensors):
            return work
        if not self._progress.enqueue(lambda: self._run_into(work, call, sequence, body, tensors)):
            self._in_flight.discard(work)
            self._check_open(call)  # another thread has just closed the group
        if not async_op:
            work.wait()
        return work

    def _ordered_on(self, device: DeviceLayer, tensors: Sequence[torch.Tensor]) -> StreamOrder | None:
        owned = [tensor for tensor in tensors if device.owns(tensor)]
        return device.order(owned) if owned else None

    def _run_prepared(self, prepared: PreparedAllReduce, tensor: torch.Tensor, op: Reduction) -> None:
        """As `_run`; see Note [Prepared calls]."""
        sequence = next(self._sequence)
        if self._first_failure is not None:
            raise self._failed_before(Collective("all_reduce", tensor, op), sequence)
        deadline = self._deadline = Deadline(self.timeout_s)
        try:
            prepared(tensor, deadline)
        except BaseException as error:  # noqa: BLE001 - raised again
            self._fail(error, Collective("all_reduce", tensor, op), sequence, deadline)
        finally:
            self._deadline = None
        if self._first_failure is not None:
            raise self._first_failure  # it was aborted meanwhile

    def _run_into(
        self, work: PendingWork, call: Collective, sequence: int | None, body: Body, tensors: Sequence[torch.Tensor]
    ) -> None:
        try:
            self._run(call, sequence, body, tensors)
        except BaseException as error:  # noqa: BLE001 - a waiter on another thread must get it, whatever it is
            self._in_flight.discard(work)
            work.fail(error)
        else:
            self._in_flight.discard(work)
            work.succeed()

    def _run(self, call: Collective, sequence: int | None, body: Body, tensors: Sequence[torch.Tensor]) -> None:
        """Run one collective to its end. What goes wrong is the group's first failure."""
        if self._first_failure is not None:
            raise self._failed_before(call, sequence)
        deadline = self._deadline = Deadline(self.timeout_s)
        try:
            if self._check_calls and sequence is not None:
                self._compare(call, deadline)
            if is_tracked(tensors):
                with untracked():
                    body(deadline)
            else:
                body(deadline)
        except BaseException as error:  # noqa: BLE001 - raised again
            self._fail(error, call, sequence, deadline)
        finally:
            self._deadline = None
        if self._first_failure is not None:
            raise self._first_failure  # it was aborted meanwhile

    def _fail(self, error: BaseException, call: Collective, sequence: int | None, deadline: Deadline) -> NoReturn:
        """A collective has failed: remember why, tell the other ranks, and raise it in the group's words."""
        failure = error
        if isinstance(error, TimeoutError):
            _given_up.append(error)
            failure = self._aborted() if deadline.was_cancelled else self._timed_out(call, sequence, error)
        elif isinstance(error, SynclineError):
            failure = type(error)(f"{self._in_words(call, sequence)}: {error}")
            failure.__cause__ = error.__cause__
        else:
            _given_up.append(error)
        self._first_failure = failure
        self._transport.give_up()
        if failure is error:
            raise error
        raise failure from failure.__cause__

    def _compare(self, call: Collective, deadline: Deadline) -> None:
        """Gather what all ranks are about to do: eight bytes of each, and the words only where these differ."""
        mine = torch.tensor([crc32(call.signature().encode())], device="cpu")
        digests = self._empty_block(mine)
        self._transport.all_gather(digests, mine, call, deadline)
        if digests.eq(mine).all():
            return
        line = torch.frombuffer(bytearray(call.signature().encode()[:_WORDS_BYTES].ljust(_WORDS_BYTES)), dtype=torch.uint8)
        lines = self._empty_block(line)
        self._transport.all_gather(lines, line, call, deadline)
        said = [bytes(row.tolist()).decode(errors="replace").strip() for row in lines.view(self.size, _WORDS_BYTES)]
        raise different_calls(said)

    # ---- complaints ----

    def _check_open(self, call: Collective) -> None:
        if self._closed:
            raise GroupClosedError(
                f"{call.name} on {self.place()}: the group is closed; create it again with init_process_group or new_group"
            )

    def _check_usable(self, call: Collective) -> None:
        self._check_open(call)
        if self._first_failure is not None:
            raise self._failed_before(call, None)

    def _in_words(self, call: Collective, sequence: int | None) -> str:
        number = "" if sequence is None else f", number {sequence}"
        return f"{call.signature()}{number} on {self.place()}"

    def _aborted(self) -> TransportError:
        return TransportError(f"the group was aborted on {self.place()}")

    def _timed_out(self, call: Collective, sequence: int | None, error: TimeoutError) -> CollectiveTimeout:
        timeout = CollectiveTimeout(
            f"{self._in_words(call, sequence)}, did not finish within {self.timeout_s:g} s: {error}. Look for a rank that "
            "died, left early, or issued other collectives; a longer time limit is the `timeout` of init_process_group"
        )
        timeout.__cause__ = error
        return timeout

    def _failed_before(self, call: Collective, sequence: int | None) -> TransportError:
        error = TransportError(
            f"{self._in_words(call, sequence)}, was not started because the group had failed before: {self._first_failure}"
        )
        error.__cause__ = self._first_failure
        return error

    # ---- packing ----

    def _empty_block(self, part: torch.Tensor) -> torch.Tensor:
        return torch.empty(self.size * part.numel(), dtype=part.dtype, device=part.device)

    def _unpack(self, block: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        for output, part in zip(outputs, block.view(self.size, block.numel() // self.size), strict=True):
            output.copy_(part.view(output.shape))


def members_of(color: int, colors_and_keys: Sequence[Sequence[int]]) -> list[int]:
    """The ranks that gave a color, ordered by key, then by rank. A pure function."""
    chosen = [(key, rank) for rank, (given, key) in enumerate(colors_and_keys) if given == color]
    return [rank for _, rank in sorted(chosen)]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return flat(in_plain_order(tensor))


def _copy_back(wire: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the copy in plain order back to the tensor that it stands for."""
    if wire is not tensor:
        tensor.copy_(wire)
