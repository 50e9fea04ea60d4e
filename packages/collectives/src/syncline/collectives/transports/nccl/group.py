"""`NcclGroup`: a process group over NCCL."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

import torch
from typing_extensions import override

from ...engine.call import FAILED, QUEUED, Call, Signature
from ...engine.cancel_scope import CancelScope
from ...engine.device import Event
from ...engine.engine_group import EngineGroup, members_of
from ...engine.queue import Queue
from ...errors import (
    CollectiveTimeout,
    DisagreementError,
    InvalidArgumentError,
    MisuseError,
    SynclineError,
    TransportError,
    headline,
    in_words,
    with_details,
)
from ...group import ProcessGroup
from ...health.agreement import Comparison, History
from ...health.monitor import call_now_and_then
from ...reduce_op import Reduction
from ...tensors.layout import is_tracked, untracked
from ...work import FinishedWork, PendingWork, Work
from .communicator import version_in_words
from .connections import Connections, Connector, StreamCommunicator
from .in_flight import FatalError, InFlight
from .plan import NcclPlan, PlannedCall, run_planned
from .rendezvous import GroupRendezvous, Payload, RendezvousCarrier
from .work import Batch, Failure, StreamWork

logger = logging.getLogger("syncline.collectives")

# How long a rank that closes a group waits for the others, to compare their calls. The time is short, because this rank cannot
# know whether another rank has failed and will not come.
_CLOSE_S = 5.0
# Up to this many ranks compare their calls after each backward. With more ranks, one rank would receive too many messages.
_COMPARED_EACH_TIME = 16
# A thread that is inside a store when the interpreter shuts down crashes the process. At exit, queues wait for their threads
# only for a short time; this event makes the waits of these threads end sooner.
_exiting = threading.Event()
atexit.register(_exiting.set)


class NcclGroup(EngineGroup):
    """A group whose collectives run on the GPU of each rank.

    The steps of a call::

        _issue ─ the queue's turn ─► _issue_in_turn: communicator, plan ─► _put_on_stream: the plan runs, an event ─► StreamWork

    The objects of a call. An arrow means "holds"::

        StreamWork: the user's handle ─► Launch: what is on the stream ─► Call: one call, or each call of a batch

    A `PlannedCall` holds a call, its plan and its tensors, but only until the call is on the stream.

    Note [Order over NCCL]
    ~~~~~~~~~~~~~~~~~~~~~~
    1. All collectives of the group run on one stream, in the order in which the group's queue gives turns to the callers'
       threads. A collective starts after all operations that are on the caller's current stream at the call.
    2. The call returns when the collective is on the stream. But if NCCL must connect ranks first, the call blocks until they
       are connected. NCCL connects ranks at the group's first collective, at the first gather, scatter and all-to-all, and at
       the first reduction in steps (see `NcclPlan`). `wait` makes the current stream wait for the collective. `wait` blocks the
       calling thread only with a timeout, or for a barrier.
    3. For the CPU, a future is complete when the collective is on the stream. A callback runs on the thread that attaches it,
       before this thread issues another call. While the callback runs, the thread's current stream waits for the collective. So
       a collective that the callback issues has the same place in the order on every rank. `StreamWork.get_future` names two
       exceptions.
    4. `send` and `recv` have no place in the order, because each direction between two ranks has its own communicator and
       stream. A separate thread connects the two ranks.
    5. A future's callback may issue collectives. So a thread must hold no lock when it completes a future. Therefore the thread
       calls `StreamWork.settle` only after its turn in the queue. If an error must end the group, the code in the turn raises a
       `FatalError`. The group ends after the turn.

    The group serves only the GPU of its first call. After this call, a CUDA graph can capture all calls except `barrier`,
    `wait` with a timeout, `all_reduce` of a sparse tensor, and the first transfer with a peer.

    NCCL's own reductions differ from `ReduceOp` in two ways, as in torch. NCCL rounds float16 and bfloat16 at each addition.
    For AVG, NCCL multiplies each term by 1/size before the addition. If `reproducible` is True, these differences do not exist,
    but a reduction is slower and needs copies of the tensor.

    Note [Comparison over NCCL]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~
    NCCL does not compare calls: if ranks make different calls, they get wrong sums or wait for ever. So a thread of the group
    compares the histories of the ranks (`Comparison.LATER` in `health.agreement`) by messages on the host. A training step does
    not wait for the comparison. If a comparison finds a difference, the group ends, and the next call on the group raises the
    error.

    A barrier with `async_op=False` waits for a comparison, and raises the comparison's error even if NCCL never ends the
    barrier. `close` also waits for a comparison, for at most `_CLOSE_S` seconds. A group of N ranks compares after every n-th
    backward, where n is N / `_COMPARED_EACH_TIME`, rounded up.

    If `check_calls` is True (`Comparison.BEFORE`), the ranks instead compare each collective before they issue it. The CPU
    waits for this comparison during the call's turn. So all ranks must then issue the calls of all groups in one order. A send
    or receive of another thread waits until the comparison is over. If the ranks met in a store, a failure of another rank ends
    the wait within a second. If the ranks met in a host group, only the time limit or a lost rank ends the wait.

    Calls in a CUDA graph are compared at the capture, and not at a replay.

    Args:
        of_all_ranks: the communicator of all ranks of this group, if the group was split from another group.
        reproducible: whether to reduce in rank order if the result depends on the order.
        check_calls: whether the ranks compare each collective before it is issued.
        owns_rendezvous: whether the group owns its rendezvous; False for a part of another group.
    """

    def __init__(
        self,
        connector: Connector,
        *,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
        of_all_ranks: StreamCommunicator | None = None,
        reproducible: bool = False,
        check_calls: bool = False,
        owns_rendezvous: bool = True,
    ) -> None:
        size = len(connector.ranks)
        carrier = RendezvousCarrier(connector.agree)
        super().__init__(
            connector.rank,
            size,
            carrier,
            name=connector.name,
            timeout_s=timeout_s,
            ranks=ranks,
            check_calls=check_calls,
        )
        self._connector = connector
        self._runtime = connector.runtime
        self._reproducible = reproducible
        self._owns_rendezvous = owns_rendezvous
        self._device_types = frozenset({self._runtime.device_type})
        rendezvous = connector.rendezvous
        self._in_flight = InFlight(
            self.place,
            lambda: self._connections.background(),
            self._reported,
            tell=lambda error: rendezvous.announce(self.name, f"{self.place()} failed: {in_words(error)}"),
            hear=lambda: rendezvous.announced(self.name, connector.ranks),
        )
        self._connections = Connections(connector, self.place, lambda: self.timeout_s, self._in_flight, of_all_ranks)
        self._batch: Batch | None = None
        self._comparing = Queue(f"syncline-nccl-calls-{self.name}-rank{self.rank}")
        weakref.finalize(self, self._comparing.drop).atexit = False
        self._compares_every = -(-size // _COMPARED_EACH_TIME)
        self._asked_to_compare = 0
        self._subsets_made: Counter[tuple[str, tuple[int, ...]]] = Counter()
        call_now_and_then(self._in_flight)

    # ---- properties of the group ----

    @property
    def backend_name(self) -> str:
        """The name "nccl"."""
        return "nccl"

    @property
    def device_types(self) -> frozenset[str]:
        """The type "cuda" only."""
        return self._device_types

    def describe(self) -> str:
        """Return a text with NCCL's version."""
        return f"nccl: NCCL {version_in_words(self._connector.nccl)} through CuPy"

    @property
    def first_failure(self) -> BaseException | None:
        """The error that ended the group, or None. See Note [Failure over NCCL] in `in_flight`."""
        failure = self._in_flight.failure
        return None if failure is None else failure.error

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str | None = None) -> torch.Tensor:
        """Allocate a tensor with torch, by default on the current GPU."""
        return super().allocate(numel, dtype, self._runtime.current_device() if device is None else device)

    # ---- collectives ----

    @override
    def _issue(
        self, signature: Signature, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], async_op: bool
    ) -> Work:
        if signature.name == "barrier":
            return self._barrier(signature, async_op)
        device = self._device_of(signature, (*reads, *writes))
        call = Call(signature, None, reads, writes, mark=self._take_mark())
        with self._ending_the_group_if_fatal():
            work, is_put = self._queue.run_in_turn(self._issue_in_turn, call, device, async_op)
        # A call of an open batch is not on the stream yet; `coalescing` settles it at its end.
        if is_put:
            work.settle()
        if not async_op:
            work.wait()
        return work

    @override
    def _all_reduce_sparse(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        if self._runtime.is_capturing():
            raise MisuseError(
                f"all_reduce of a sparse tensor on {self.place()}: it reads the numbers of elements on the CPU, "
                "but a CUDA graph is being captured; pass tensor.to_dense()"
            )
        return super()._all_reduce_sparse(tensor, op, async_op)

    def _barrier(self, signature: Signature, async_op: bool) -> StreamWork:
        if self._runtime.is_capturing():
            raise MisuseError(
                f"{signature} on {self.place()}: it blocks the CPU, but a CUDA graph is being captured, in which "
                "nothing can be waited for on the CPU"
            )
        device, call = self._device_of(signature, ()), Call(signature, None, (), (), mark=self._take_mark())

        def issue_in_turn() -> tuple[StreamWork, PendingWork | FinishedWork | None]:
            work, _ = self._issue_in_turn(call, device, async_op)
            # Begin the comparison before the wait: NCCL may never end calls that differ, nor a barrier after such calls. Begin
            # the comparison in the barrier's turn, so that no call of another thread comes between the two.
            return work, None if async_op else self._compare()

        with self._ending_the_group_if_fatal():
            work, comparison = self._queue.run_in_turn(issue_in_turn)
        work.settle()
        if comparison is None:
            self._compare_now_and_then()
        else:
            work.wait()
            self._wait_for_comparison(comparison)
        return work

    def _issue_in_turn(self, call: Call, device: torch.device, async_op: bool) -> tuple[StreamWork, bool]:
        """Put a call on the stream, or into the batch that this thread fills.

        The calling thread must have its turn in the group's queue.

        Return the work, and whether the call is on the stream.
        """
        self._check_usable(call.signature)
        if self._comparison is not Comparison.BEFORE:
            return self._put(call, device, async_op)
        # Record the call before the comparison, so that reports show in which call the ranks differ or wait.
        self._take_number(call)
        self._begin(call)
        try:
            self._compare_before(call)
            return self._put(call, device, async_op)
        # The call differs, is refused, or cannot be put on the stream. Record that the call has failed.
        except BaseException:
            call.is_over(FAILED)
            raise

    def _put(self, call: Call, device: torch.device, async_op: bool) -> tuple[StreamWork, bool]:
        """Do the rest of `_issue_in_turn`, after the ranks have compared the call if necessary."""
        link = self._connections.link_of_all_ranks(call.signature, device)
        plan = self._plans.get(call.signature) or self._make_plan(call.signature)
        assert isinstance(plan, NcclPlan)
        batch = self._batch
        # Other threads' calls are not part of the batch. They go to the stream at once.
        if batch is not None and batch.is_here():
            return self._add_to(batch, plan, call, device, async_op), False
        self._take_number(call)
        work = self._new_work(call, [call], list(call.writes), device)
        self._put_on_stream(link, work, [PlannedCall.of(plan, call)], self._runtime.now(device))
        return work, True

    @override
    def _new_plan(self, signature: Signature) -> NcclPlan:
        device = self._connections.device
        link = self._connections.link_of_all_ranks(signature, device)
        return NcclPlan(link.communicator, signature, device, reproducible=self._reproducible)

    def _put_on_stream(self, link: StreamCommunicator, work: StreamWork, calls: Sequence[PlannedCall], *after: Event) -> None:
        """Put calls on a stream, to start after the events `after`. The caller must call `work.settle` afterwards.

        Raises:
            FatalError: the calls could not be issued. Other ranks may have issued them, so later calls would not match.
        """
        captured = self._runtime.is_capturing()
        if not captured:  # captured calls run only when the program replays the graph
            self._in_flight.watch(work.launch)

        # As in `HostGroup`: most tensors do not need the context, and this test costs less than the context.
        tracked = any(is_tracked(call.reads) or is_tracked(call.writes) for call in calls)

        def body() -> None:
            with untracked() if tracked else nullcontext():
                run_planned(link.communicator, calls)

        try:
            # The group may have failed since `_check_usable`. Its communicators are aborted then, so no call may reach them.
            if self.first_failure is not None:
                raise self.first_failure
            if captured:
                self._connections.note_capture()
            for planned in calls:
                self._begin(planned.call)
            *earlier, last = after
            with link.lock:
                for event in earlier:
                    link.stream.wait_for(event)
                done = link.stream.run(body, last)
        except BaseException as error:
            raise FatalError(_described(work, error)) from error
        work.note_on_stream(link.stream, done, captured=captured)

    def _take_number(self, call: Call) -> None:
        # With `check_calls`, the call has got its number before the comparison.
        if call.number is None:
            call.number = next(self._numbers)
            self.recorder.add(call)

    def _begin(self, call: Call) -> None:
        if call.state == QUEUED:
            self.recorder.begin(call)
        # A transfer between two ranks has no number, and no place in the order.
        if self._comparison is Comparison.LATER and call.number is not None:
            self._agreed.add(call.digest())
            if self._agreed.is_due:
                self._compare()

    def _new_work(
        self,
        title: Call,
        calls: list[Call],
        tensors: list[torch.Tensor],
        device: torch.device,
        *,
        source: int | None = None,
        batch: Batch | None = None,
    ) -> StreamWork:
        return StreamWork(
            title, calls, tensors, self.place, self._runtime, device, timeout_s=self.timeout_s, source=source, batch=batch
        )

    def _device_of(self, signature: Signature, tensors: Sequence[torch.Tensor]) -> torch.device:
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            named = " and ".join(sorted(map(str, devices)))
            raise InvalidArgumentError(f"{signature} on {self.place()}: expected all tensors on one GPU, found {named}")
        # A barrier has no tensors, so it takes the group's GPU.
        return devices.pop() if devices else self._connections.device

    # ---- several collectives as one ----

    @contextmanager
    def coalescing(self) -> Iterator[None]:
        """Return a context manager in which all collectives of this thread become one call of NCCL, with one `Work` object.

        The collectives must have `async_op=True`. Each collective waits for the stream that is current when the program issues
        the collective. The context does not affect `send` and `recv`.

        Raises:
            MisuseError: a call has `async_op=False`, is a barrier, or takes several steps (see `NcclPlan`). Or another such
                context of the group is open.
        """
        batch = Batch()
        try:
            try:
                self._queue.run_in_turn(self._open_batch, batch)
                yield
            finally:
                # Close the batch before its work is settled: calls that callbacks issue must not become part of the batch. Do
                # not wait for a turn: Ctrl-C in this wait would leave the batch open for ever.
                if self._batch is batch:
                    self._batch = None
            # If no call was issued inside the context, there is no work.
            if batch.work is not None:
                with self._ending_the_group_if_fatal():
                    self._queue.run_in_turn(self._put_batch, batch, batch.work)
                batch.work.settle()
        except BaseException as error:
            # No thread may wait for the batch's work for ever, even if the error comes from the body of the `with`.
            if batch.work is not None:
                # Calls that were not issued are over. Issued calls may still use their tensors, so `InFlight` releases them.
                if not batch.is_issued:
                    batch.calls.clear()
                    batch.work.launch.fail(Failure(error))
                batch.work.fail(Failure(error))
            raise

    def _open_batch(self, batch: Batch) -> None:
        if self._batch is not None:
            raise MisuseError(f"coalescing on {self.place()}: another coalescing context is open; close it first")
        self._batch = batch

    def _add_to(self, batch: Batch, plan: NcclPlan, call: Call, device: torch.device, async_op: bool) -> StreamWork:
        if not async_op or plan.in_steps or call.signature.name == "barrier":
            raise MisuseError(
                f"{call.signature} on {self.place()} cannot be coalesced: it waits, or NCCL needs several steps for it; "
                "pass async_op=True, or issue it outside"
            )
        if batch.work is None:
            title = Call(Signature("coalesced"), next(self._numbers))
            batch.work = self._new_work(title, [], [], device, batch=batch)
        self._take_number(call)
        batch.calls.append(PlannedCall.of(plan, call))
        batch.work.add(call)
        # The batch may end while another stream is current. This event makes the batch start after the operations that wrote
        # the call's tensors.
        batch.after[self._runtime.current_stream(device)] = self._runtime.now(device)
        return batch.work

    def _put_batch(self, batch: Batch, work: StreamWork) -> None:
        signature = Signature("coalesced")
        self._check_usable(signature)
        link = self._connections.link_of_all_ranks(signature, self._connections.device)
        calls, batch.calls, batch.is_issued = batch.calls, [], True
        self._put_on_stream(link, work, calls, *batch.after.values(), self._runtime.now(link.stream.device))

    # ---- two ranks ----

    @override
    def check_transfer(self, name: str, tensor: torch.Tensor, peer: int | None, tag: int) -> None:
        super().check_transfer(name, tensor, peer, tag)
        if tag != 0:
            self._refuse_if(name, f"NCCL has no tags, found tag {tag}; transfers between two ranks arrive in order")
        if peer is None:
            raise InvalidArgumentError(
                f"recv on {self.place()}: NCCL must know who sends; name the source, or receive on the CPU"
            )

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work:
        signature = Signature.of("send", tensor, detail=f"dst={dst}, tag={tag}")
        return self._transfer(Call(signature, None, (tensor,), ()), tensor, (self.rank, dst), async_op)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work:
        signature = Signature.of("recv", tensor, detail=f"src={src}, tag={tag}")
        assert src is not None  # see `check_transfer`
        return self._transfer(Call(signature, None, (), (tensor,)), tensor, (src, self.rank), async_op)

    def _transfer(self, call: Call, tensor: torch.Tensor, direction: tuple[int, int], async_op: bool) -> Work:
        sender, receiver = direction
        peer, source = (receiver, None) if sender == self.rank else (sender, sender)
        device = self._device_of(call.signature, [tensor])
        self._check_usable(call.signature)
        pair = self._queue.run_in_turn(self._connections.with_peer, peer, call.signature, device)
        work = self._new_work(call, [call], [tensor], device, source=source)
        self.recorder.add(call)
        if not self._runtime.is_capturing():
            self._in_flight.watch(work.launch)  # before the transfer is issued, because the peer may never connect
        after = self._runtime.now(device)

        def task(link: StreamCommunicator) -> None:
            plan = NcclPlan(link.communicator, call.signature, device)
            with self._ending_the_group_if_fatal():
                self._put_on_stream(link, work, [PlannedCall.of(plan, call)], after)
            work.settle()

        pair.submit(direction, task)
        if not async_op:
            work.wait()
        return work

    # ---- groups of some of the ranks ----

    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None:
        self._check_usable(Signature("split"))
        number = next(self._splits_made)
        scope = CancelScope(self.timeout_s, self._in_flight.reason_to_give_up)
        said = self._connector.agree(f"split {number}", {"color": color, "key": key}, _all_said, scope)
        members = None if color is None else members_of(color, said["all"])
        with self._ending_the_group_if_fatal():
            self._check_usable(Signature("split"))
            of_all_ranks = self._queue.run_in_turn(self._connections.split, members, scope)
        # This rank gets no group, but all ranks must take part in NCCL's split.
        if members is None:
            return None
        return self._part(self._connector.part(members, f"{self.name}/{number}.{color}"), members, timeout_s, of_all_ranks)

    def _subset(self, members: list[int], name: str, timeout_s: float) -> ProcessGroup:
        """Make a group of the ranks `members`, which all call this method. The new group connects at its first use."""
        self._check_usable(Signature("subset"))
        # The number distinguishes groups with the same name and members.
        asked = (name, tuple(members))
        self._subsets_made[asked] += 1
        topic = f"{name}/{'-'.join(map(str, members))}.{self._subsets_made[asked]}"
        return self._part(self._connector.part(members, topic), members, timeout_s)

    def _part(
        self, connector: Connector, members: Sequence[int], timeout_s: float, of_all_ranks: StreamCommunicator | None = None
    ) -> NcclGroup:
        made = type(self)(
            connector,
            timeout_s=timeout_s,
            ranks=[self.ranks[member] for member in members],
            of_all_ranks=of_all_ranks,
            reproducible=self._reproducible,
            check_calls=self._check_calls,
            owns_rendezvous=False,
        )
        made.recorder.members = tuple(self.recorder.members[member] for member in members)
        made.report_to(self._reporter)
        return made

    # ---- agreement; see Note [Comparison over NCCL] ----

    def _compare_before(self, call: Call) -> None:
        """Compare a call with the other ranks before it is issued. The CPU waits for the other ranks.

        Raises:
            FatalError: the ranks call different collectives, or a rank did not come.
        """
        what = f"{call} on {self.place()}"
        scope = CancelScope(self.timeout_s, lambda: self._in_flight.reason_not_to_come(what))
        try:
            self._check_same_call(call, scope)
        except SynclineError as error:
            # These errors name the call already.
            if error is scope.reason or isinstance(error, DisagreementError):
                raise FatalError(error) from error
            described: SynclineError
            if scope.is_over():
                described = CollectiveTimeout(
                    with_details(
                        f"{what}, did not start within {self.timeout_s:g} s, because not all ranks came to the comparison of "
                        "calls (check_calls); look for a rank that died, left early, or computes for long",
                        headline(error),
                    )
                )
            else:
                described = error.reworded(f"the comparison of {what} (check_calls): {error}")
            described.__cause__ = error
            raise FatalError(described) from error

    @override
    def agree_on_calls(self, *, async_op: bool = False) -> Work | None:
        """See `ProcessGroup.agree_on_calls`. If `async_op` is True, return None at once: another thread compares the calls."""
        # A closed group refuses this call. If the group has failed, the wait below or the next call raises the failure.
        if self._comparison is Comparison.LATER and self._closed:
            raise self._refusal(Signature("agree_on_calls"))
        if async_op:
            self._compare_now_and_then()
            return None
        work = self._queue.run_in_turn(self._compare)
        self._wait_for_comparison(work)
        return work

    def _compare_now_and_then(self) -> None:
        self._asked_to_compare += 1
        # All ranks count alike, so they skip the same comparisons.
        if self._asked_to_compare % self._compares_every == 0:
            self._queue.run_in_turn(self._compare)

    def _wait_for_comparison(self, work: PendingWork | FinishedWork) -> None:
        error: SynclineError | None = None
        try:
            work.wait()
        except SynclineError as raised:
            error = raised
        # If the group has failed, its first failure says more than the comparison's error.
        if self._in_flight.failure is not None:
            raise self._in_flight.failure.tell()
        if error is not None:
            raise error.reworded(f"the comparison of calls on {self.place()}: {error}")

    def _compare(self) -> PendingWork | FinishedWork:
        """Start to compare the calls, on a separate thread. The caller must have its turn in the group's queue."""
        if self._comparison is not Comparison.LATER:
            return FinishedWork([])
        work = PendingWork([], lambda: f"the comparison of calls on {self.place()}")
        until, timeout_s = self._agreed.history, self.timeout_s
        if not self._comparing.enqueue(lambda: self._run_comparison(work, until, timeout_s)):
            work.succeed()  # the group has been closed
        return work

    def _run_comparison(self, work: PendingWork, until: History, timeout_s: float) -> None:
        try:
            # After a failure, compare nothing: threads that wait for the comparison raise the failure itself.
            if self.first_failure is None:
                limit_s = min(timeout_s, _CLOSE_S) if self._is_closing else timeout_s
                self._agreed.same_history(CancelScope(limit_s, self._reason_not_to_compare), until)
        except DisagreementError as error:
            work.fail(self._in_flight.report_and_fail(error))
        except SynclineError as error:
            # The group goes on: the missing rank has not issued all calls yet, or has ended. If a collective waits for this
            # rank, the collective times out.
            logger.info("group '%s': calls were not compared: %s", self.name, error)
            work.fail(error)
        except BaseException as error:  # noqa: BLE001 - otherwise the error would be lost on this thread
            work.fail(self._in_flight.report_and_fail(error))
        else:
            work.succeed()

    def _reason_not_to_compare(self) -> TransportError | None:
        if _exiting.is_set():
            return TransportError("the process ends")
        # `close` has waited for `_CLOSE_S` seconds before it set `_closed`.
        if self._is_closing and self._closed:
            return TransportError("this rank has closed the group, and another rank does not come")
        return self._in_flight.reason_to_give_up()

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
        """See `ProcessGroup.beside`. The new group connects at its first use."""
        before = self._connector
        rendezvous = GroupRendezvous(host, owned=before.rendezvous.owns_group)
        connector = Connector(before.nccl, before.runtime, rendezvous, range(host.size), host.rank, self.name)
        made = type(self)(connector, timeout_s=self.timeout_s, reproducible=self._reproducible, check_calls=self._check_calls)
        self._is_replaced = True
        made.recorder.members = host.members
        made.report_to(self._reporter)
        return made

    @override
    def _shrink(self, silence_timeout_s: float) -> ProcessGroup:
        host = self._connector.rendezvous.group
        assert host is not None
        self._closed = True
        self._end_in_flight(self.first_failure or self._words.aborted())
        # NCCL does not report which rank has failed, so the host group finds out which ranks are left.
        return self.beside(host.shrink(silence_timeout_s=silence_timeout_s))

    # ---- the end ----

    @override
    def in_fork(self) -> None:
        super().in_fork()
        self._comparing.leave_to_parent()

    @override
    def _meet_before_close(self) -> None:
        # A group that was never used closes without waiting for the other ranks.
        if self._comparison is Comparison.LATER and self._agreed.history.calls:
            # An earlier comparison may run for the whole time limit, because nothing can end a receive of a host group early.
            with suppress(SynclineError):  # a difference has ended the group already; a missing rank is not a failure here
                self._queue.run_in_turn(self._compare).wait(_CLOSE_S)

    @override
    def _close(self) -> None:
        """Wait until the GPU has finished, then give the communicators back to NCCL.

        Raises:
            BaseException: the error that ended the group, if no call has raised this error yet. Results since the failure are
                garbage.
            TransportError: calls in flight do not finish, or NCCL keeps a communicator, for example because of a CUDA graph.
        """
        if self._closed:
            return  # another thread has aborted the group meanwhile
        self._closed = True
        self._comparing.stop()
        self._plans.clear()
        try:
            is_drained = self._in_flight.drain(self.timeout_s)
            self._is_over = True
            if is_drained:
                # Stop before the communicators are destroyed: from now on, the monitor does not ask them for errors.
                self._in_flight.stop()
                self._connections.give_back()
                return
            # If the group has failed already, this changes nothing: the first failure counts.
            self._in_flight.fail(
                TransportError(f"what was in flight did not finish when the group was closed on {self.place()}")
            )
            failure = self._in_flight.failure
            # A program that has not seen the failure would trust the results since then.
            if failure is not None and not failure.was_told:
                raise failure.tell()
        finally:
            if self._owns_rendezvous:
                self._connector.rendezvous.close()

    @override
    def _abort(self, failure: BaseException) -> None:
        """End the group without waiting for a turn in the queue: the thread that has the turn may be stuck in NCCL."""
        self._end_in_flight(failure)
        if self._owns_rendezvous:
            self._connector.rendezvous.abort()

    def _end_in_flight(self, failure: BaseException) -> None:
        self._in_flight.fail(failure)
        self._comparing.stop()

    @contextmanager
    def _ending_the_group_if_fatal(self) -> Iterator[None]:
        """If the body of this context raises a `FatalError`, end the group.

        The calling thread must hold no lock: see point 5 of Note [Order over NCCL].
        """
        try:
            yield
        except FatalError as fatal:
            error = self._in_flight.report_and_fail(fatal.error)
            failure = self._in_flight.failure  # if the group had failed before, this is the first failure
            assert failure is not None
            raise failure.tell() from (error.__cause__ if failure.error is error else error)

    @override
    def _note_failure_is_seen(self) -> None:
        failure = self._in_flight.failure
        if failure is not None:
            failure.tell()


def _described(work: StreamWork, error: BaseException) -> BaseException:
    # If this is another library's error, or Ctrl-C, keep its type.
    if not isinstance(error, SynclineError):
        return error
    described = error.reworded(f"{work.launch.describe()}: {error}")
    described.__cause__ = error
    return described


def _all_said(words: list[Payload]) -> Payload:
    return {"all": [[entry["color"], entry["key"]] for entry in words]}
