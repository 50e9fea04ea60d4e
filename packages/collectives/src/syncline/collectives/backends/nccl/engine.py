"""From a call to a stream: connects when needed, issues in order, and has everything watched."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from typing_extensions import override

from ...contract.collective import Collective
from ...contract.deadline import Deadline
from ...contract.layout import untracked
from ...errors import GroupClosedError, InvalidArgumentError, MisuseError, SynclineError, TransportError
from ...failures.flight_recorder import Entry, FlightRecorder
from ...forks import Inherited, not_the_rank, tell_in_forks
from .accelerator import Event
from .algorithms import Body
from .batch import Batch
from .communicator import Communicator
from .connections import Connections
from .connector import Connector, StreamCommunicator
from .failure import Failure, FatalError
from .issued_calls import IssuedCalls
from .pending_collective import Description
from .watchdog import Watchdog
from .work import NcclWork


class Engine(Inherited):
    """Puts collectives on the group's stream; see Note [Order over NCCL] in `process_group`.

    Note [Callbacks and locks]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~
    A future's callback may issue collectives, so futures are completed, well or badly, by threads that hold no lock: a work is
    settled after the lock under which it was issued, and what ends the group leaves the lock as a `FatalError` first.

    Args:
        connector: how the ranks are connected.
        place: says where an error happened.
        timeout_s: says how long one collective may take; asked for each.
        stream_comm: the communicator of all ranks, if there is one already.
        recorder: of the group.
        report: of a failure, which it returns in words that say where the report is.
        with_mark: a call as the ranks compare it; see `ProcessGroup.marked`.
    """

    def __init__(
        self,
        connector: Connector,
        place: Callable[[], str],
        timeout_s: Callable[[], float],
        stream_comm: StreamCommunicator | None,
        recorder: FlightRecorder,
        report: Callable[[BaseException], BaseException],
        with_mark: Callable[[Collective], Collective],
    ) -> None:
        self._with_mark = with_mark
        self._accelerator = connector.accelerator
        self._rank = connector.rank
        self._place = place
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # held while a collective is issued: an issue is one
        name = f"syncline-nccl-{connector.name}-rank{connector.rank}"
        self._watchdog = Watchdog(name, place, lambda: self._connections.background(), report)
        self._connections = Connections(connector, place, timeout_s, self._watchdog, stream_comm)
        self._calls = IssuedCalls(
            connector, recorder, timeout_s, lambda: self._watchdog.failure, self._watchdog.report_and_fail
        )
        self._sequence = itertools.count()
        self._is_closed = False
        self._is_in_fork = False
        tell_in_forks(self)
        self._batch: Batch | None = None
        self._batch_work: NcclWork | None = None

    @property
    def device(self) -> torch.device:
        """The GPU that the group serves, or will serve if a collective without a tensor comes first."""
        return self._connections.device

    # ---- the end ----

    def close(self) -> None:
        """Compare calls, let the GPU finish and give the communicators back. After `close` or `abort` it does nothing.

        Raises:
            DisagreementError: the ranks have made different calls.
            TransportError: the group had failed, and nobody was told; or what is in flight, or NCCL, does not come to an end.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._calls.close()
        if self._watchdog.drain(self._timeout_s()):
            self._watchdog.stop()
            self._connections.give_back()
            return
        self._watchdog.fail(TransportError(f"what was in flight did not finish when the group was closed on {self._place()}"))
        self._watchdog.stop()
        failure = self._failure()
        if not failure.was_reported:
            raise failure.report()

    def abort(self) -> None:
        """End what is in flight, without waiting. Does not take the lock: its holder may be stuck in NCCL."""
        if self._is_closed:
            return
        self._is_closed = True
        self._watchdog.fail(TransportError(f"the group was aborted on {self._place()}"))
        self._watchdog.stop()
        self._calls.stop()

    # ---- the verification of calls; see Note [Verification over NCCL] in `issued_calls` ----

    def verify_calls_beside(self) -> None:
        """Verify them beside the step; this is where a step ends."""
        with self._lock:
            self._calls.verify_now_and_then()

    def verify_calls(self) -> None:
        """Verify them now, on all ranks.

        Raises:
            DisagreementError: they differ.
            TransportError: a rank did not come.
        """
        with self._lock:
            pending = self._calls.verify()
        if pending is None:
            return
        pending.is_over.wait()
        if self._watchdog.failure is not None:
            raise self._watchdog.failure.report()
        if pending.error is not None:
            raise pending.error.reworded(f"the comparison of calls on {self._place()}: {pending.error}")

    # ---- collectives ----

    def issue(
        self,
        call: Collective,
        body: Body,
        outputs: list[torch.Tensor],
        reads: Sequence[torch.Tensor] = (),
        *,
        async_op: bool,
        in_steps: bool = False,
        blocks: bool = False,
    ) -> NcclWork:
        """Put a collective on the group's stream.

        Args:
            call: for messages.
            body: what is done; see `algorithms`.
            outputs: what is written, or read and written; with `reads` all on one GPU.
            reads: what is only read.
            async_op: do not wait.
            in_steps: it calls NCCL several times.
            blocks: its `wait` blocks the CPU.
        """
        call = self._with_mark(call)
        device = self._device_of(call, [*outputs, *reads])
        if blocks and self._accelerator.is_capturing():
            raise MisuseError(
                f"{call.signature()} on {self._place()}: it blocks the CPU, but a CUDA graph is being captured, in which "
                "nothing can be waited for on the CPU"
            )
        with self._ending_the_group(), self._lock:
            self._check_usable(call)
            if self._batch is not None and self._batch.is_here():
                return self._add_to_batch(
                    call, body, outputs, reads, device, is_one_call=async_op and not in_steps and not blocks
                )
            stream_comm = self._connections.of_all(call, device)
            work = self._new_work(call, outputs, reads, device, blocks=blocks)
            entry = self._recorded(call, work)
            work.pending.note_state_in(entry)
            self._watch(work)
            self._put(stream_comm, work, _delivering(body), self._accelerator.now(device), [(call, entry)])
        work.settle()
        if not async_op:
            work.wait()
        return work

    @contextmanager
    def coalescing(self) -> Iterator[None]:
        """See `NcclGroup.coalescing`."""
        call = Collective("coalesced")
        with self._lock:
            if self._batch is not None:
                raise MisuseError(f"coalescing on {self._place()}: another coalescing context is open; close it first")
            batch = self._batch = Batch()
        work = None
        try:
            try:
                yield
            finally:
                with self._lock:
                    work, self._batch, self._batch_work = self._batch_work, None, None
            if work is not None:
                self._issue_batch(call, work, batch)
        except BaseException as error:
            if work is not None:
                work.fail(Failure(error))
            raise

    def _issue_batch(self, call: Collective, work: NcclWork, batch: Batch) -> None:
        with self._ending_the_group(), self._lock:
            self._check_usable(call)
            stream_comm = self._connections.of_all(call, self.device)
            work.pending.hold([*batch.outputs, *batch.reads])
            work.pending.note_state_in(*(entry for _, entry in batch.calls))
            self._watch(work)
            self._put(stream_comm, work, batch.run, self._accelerator.now(stream_comm.device), batch.calls)
        work.settle()

    def split(self, members: Sequence[int] | None, color: int | None, deadline: Deadline) -> StreamCommunicator | None:
        """The communicator of a part of the group; see `Connections.split`."""
        call = Collective("split")
        with self._ending_the_group(), self._lock:
            self._check_usable(call)
            return self._connections.split(call, members, color, deadline)

    def _add_to_batch(
        self,
        call: Collective,
        body: Body,
        outputs: Sequence[torch.Tensor],
        reads: Sequence[torch.Tensor],
        device: torch.device,
        *,
        is_one_call: bool,
    ) -> NcclWork:
        if not is_one_call:
            raise MisuseError(
                f"{call.signature()} on {self._place()} cannot be coalesced: it waits, or NCCL needs several steps for it; "
                "pass async_op=True, or issue it outside"
            )
        batch = self._batch
        assert batch is not None
        self._connections.of_all(call, device)
        if self._batch_work is None:
            self._batch_work = self._new_work(Collective("coalesced"), batch.outputs, (), device, batch=batch)
        batch.add(call, self._recorded(call, self._batch_work), body, outputs, reads)
        return self._batch_work

    # ---- transfers ----

    def transfer(self, call: Collective, body: Body, tensor: torch.Tensor, direction: tuple[int, int]) -> NcclWork:
        """Put a send or a receive on the stream of its direction, a pair (sender, receiver)."""
        device = self._device_of(call, [tensor])
        sender, receiver = direction
        sends = sender == self._rank
        with self._lock:
            self._check_usable(call)
            pair = self._connections.with_peer(receiver if sends else sender, call, device)
            work = self._new_work(call, [tensor], (), device, source=None if sends else sender)
            entry = self._calls.recorder.issue(None, *call)
            work.pending.note_state_in(entry)
            self._watch(work)
        after = self._accelerator.now(device)

        def task(stream_comm: StreamCommunicator) -> None:
            with self._ending_the_group():
                self._put(stream_comm, work, _delivering(body), after, [(call, entry)])
            work.settle()

        pair.submit(direction, task)
        return work

    # ---- issuing ----

    def _new_work(
        self,
        call: Collective,
        outputs: list[torch.Tensor],
        reads: Sequence[torch.Tensor],
        device: torch.device,
        *,
        blocks: bool = False,
        source: int | None = None,
        batch: Batch | None = None,
    ) -> NcclWork:
        return NcclWork(
            outputs,
            reads,
            Description(call, next(self._sequence), self._place),
            self._accelerator,
            device,
            timeout_s=self._timeout_s(),
            blocks=blocks,
            source=source,
            batch=batch,
        )

    def _recorded(self, call: Collective, work: NcclWork) -> Entry:
        """The entry in the group's record; of a batch all have its number."""
        return self._calls.recorder.issue(work.pending.describe.sequence, *call, depth=5)

    def _watch(self, work: NcclWork) -> None:
        """From before it is issued: NCCL may never return. What is captured runs later, and elsewhere."""
        if not self._accelerator.is_capturing():
            self._watchdog.watch(work.pending)

    def _put(
        self,
        stream_comm: StreamCommunicator,
        work: NcclWork,
        run: Callable[[Communicator], object],
        after: Event,
        calls: Sequence[tuple[Collective, Entry]],
    ) -> None:
        captured = self._accelerator.is_capturing()

        def issue() -> None:
            with untracked():
                run(stream_comm.communicator)

        try:
            if self._watchdog.failure is not None:
                raise self._watchdog.failure.error
            if captured:
                self._connections.note_capture()
            for call, entry in calls:
                self._calls.begin(call, entry)
            with stream_comm.lock:
                event = stream_comm.comm_stream.run(issue, after)
        except BaseException as error:
            raise FatalError(_described(work, error)) from error
        work.is_issued_as(stream_comm.comm_stream, event, captured=captured)

    # ---- failures ----

    @contextmanager
    def _ending_the_group(self) -> Iterator[None]:
        """End the group by what is fatal inside, after the locks taken inside; see Note [Callbacks and locks]."""
        try:
            yield
        except FatalError as fatal:
            error = self._watchdog.report_and_fail(fatal.error)
            failure = self._failure()  # it may have failed before, which then is the reason
            raise failure.report() from (error.__cause__ if failure.error is error else error)

    def _failure(self) -> Failure:
        failure = self._watchdog.failure
        assert failure is not None
        return failure

    @override
    def in_fork(self) -> None:
        """As if it were closed; the lock may be held for ever. CUDA does not work in a fork, so nothing is freed."""
        self._lock = threading.Lock()
        self._is_closed = self._is_in_fork = True

    def _check_usable(self, call: Collective) -> None:
        if self._is_in_fork:
            raise not_the_rank(call.name, self._place())
        if self._is_closed:
            raise GroupClosedError(
                f"{call.name} on {self._place()}: the group is closed; create it again with init_process_group or new_group"
            )
        failure = self._watchdog.failure
        if failure is not None:
            raise TransportError(
                f"{call.signature()} on {self._place()} was not started because the group had failed before: {failure.error}"
            ) from failure.report()

    def _device_of(self, call: Collective, tensors: Sequence[torch.Tensor]) -> torch.device:
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            named = " and ".join(sorted(map(str, devices)))
            raise InvalidArgumentError(f"{call.signature()} on {self._place()}: expected all tensors on one GPU, found {named}")
        return next(iter(devices), self.device)


def _described(work: NcclWork, error: BaseException) -> BaseException:
    """What NCCL says, with the collective that it was said of."""
    if not isinstance(error, SynclineError):
        return error
    described = error.reworded(f"{work.pending.describe()}: {error}")
    described.__cause__ = error
    return described


def _delivering(body: Body) -> Callable[[Communicator], None]:
    """A body with what it leaves to be done."""

    def run(comm: Communicator) -> None:
        deliver = body(comm)
        if deliver is not None:
            deliver()

    return run
