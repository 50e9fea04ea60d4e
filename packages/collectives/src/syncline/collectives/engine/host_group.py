"""`HostGroup`: a process group that runs its calls on the host, one after the other, with the plans of a transport."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn
from zlib import crc32

import torch
from typing_extensions import override

from ..errors import CollectiveTimeout, DisagreementError, GroupClosedError, SynclineError, TransportError
from ..forks import not_the_rank
from ..group import ProcessGroup
from ..health.agreement import Comparison, MessageCarrier, different_splits
from ..health.leaving import GroupLeavers
from ..health.liveness import Liveness
from ..health.monitor import call_now_and_then, watch
from ..health.stalls import StallWatch
from ..tensors import checks
from ..tensors.layout import empty_block, flat, in_plain_order, is_tracked, pack, unpack, untracked
from ..torch_internals import modes_active
from ..work import FinishedWork, PendingWork, TensorsFuture, Work, devices_of
from .call import DONE, FAILED, Call, Signature
from .cancel_scope import CancelScope, start_thread
from .device import DeviceRuntime, StreamOrder
from .engine_group import LONGEST_REPORT_S, EngineGroup, members_of
from .queue import GuardedFuture, Queue
from .transfer import TransferWork
from .transport import Plan, Request, Transport

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger("syncline.collectives")

Body = Callable[[Call], None]

# How long a rank that closes a group waits for the other ranks, if they compare all their calls now.
_CLOSE_S = 60.0
# How long a rank that closes a group waits if each call was compared before it ran. Then the rank only finds out whether all
# ranks close the group.
_FREE_S = 5.0
# How long the monitor waits for a report before it ends the process.
_REPORT_S = 2.0

# After a group has given up a call, a library may still write to the call's tensors, so their memory must not be freed at once.
# So we keep the call's error: its traceback holds the frames, and the frames hold the tensors and their contiguous copies.
#
# Only the latest errors are kept, because a job that makes a new group after each failure must not need more memory each time.
# A group fails only once: after its first failure it starts no other call, and its transport gives up. So an error is dropped
# only after `GIVEN_UP_KEPT` other groups have failed.
GIVEN_UP_KEPT = 16
_given_up: deque[BaseException] = deque(maxlen=GIVEN_UP_KEPT)


class HostGroup(EngineGroup):
    """A `ProcessGroup` that runs its calls one after the other, with the plans of a `Transport`.

    The steps of a call::

        _issue ─ queue: this thread or the queue's ─► _run ─ agreement ─ _move: find the plan, pack, run it, unpack

    [1] `_issue` makes the `Call`. With `async_op=False` and no call in flight, the call runs on the caller's thread. Otherwise
        the call is queued.
    [2] `_run` sets the call's time limit, and adds the call to the history that the ranks compare, or compares the call now.
        Note [Comparison of calls] in `health.agreement` says who compares which calls.
    [3] `_move` finds the plan of the call's signature, or asks the transport for a new plan. The plan moves the data.
    [4] An error in [2] or [3] is the group's first failure. Afterwards every call fails with an error that shows the first
        failure.

    Sends and receives do not go through the queue. They start at once, on the caller's thread.

    Args:
        transport: moves the tensors.
        device: the runtime of a type of device, such as CUDA. The group then accepts tensors on these devices and in host
            memory. None: only tensors in host memory. See Note [Order on the device] in `device`.
        check_calls: whether the ranks compare each call, with its shapes, before the call runs.
        leavers: knows which ranks have left the job, or None. See Note [Who will not come] in `health.leaving`.
        liveness: finds out which ranks are lost, or None. With `liveness`, the monitor (`health.monitor`) watches the running
            call.
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
        device: DeviceRuntime | None = None,
        check_calls: bool = False,
        leavers: GroupLeavers | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        super().__init__(
            rank,
            size,
            MessageCarrier(transport, rank, size),
            name=name,
            timeout_s=timeout_s,
            ranks=ranks,
            check_calls=check_calls,
            transport_compares=transport.compares_every_call,
            count=None if leavers is None else leavers.count,
            liveness=liveness,
        )
        self._transport = transport
        self._leavers = leavers
        self._liveness = liveness
        self._device = device
        self._device_types = frozenset({"cpu"} if device is None else {"cpu", device.device_type})
        self._in_flight: set[PendingWork] = set()
        self._first_failure: BaseException | None = None
        self._was_seen = False  # whether the program has seen the first failure; if not, `close` raises it
        self._running: Call | None = None
        self._stall_warning_s = 0.0
        self._stall_watch: StallWatch | None = None
        # Whether this rank may close the library's objects: true if no other rank uses them any more.
        self._all_close = size == 1 or not transport.closes_together
        # Only a group that knows its processes can say which rank is lost, so only such a group is watched.
        if liveness is not None:
            watch(self)
        if leavers is not None:
            leavers.belong_to(self)

    # ---- properties of the group ----

    @property
    def backend_name(self) -> str:
        """The name of the backend in the registry, such as "mpi"."""
        return self._transport.backend_name

    @property
    def device_types(self) -> frozenset[str]:
        """The CPU and, if the group has a `device`, the type of this device."""
        return self._device_types

    @override
    def describe(self) -> str:
        return self._transport.describe()

    @override
    def meeting_store(self) -> dist.Store | None:
        return self._transport.meeting_store()

    @property
    def first_failure(self) -> BaseException | None:
        """The error of the first call that failed, or the error of `abort`; None while the group works."""
        return self._first_failure

    # ---- start ----

    @override
    def start(self, options: Mapping[str, object], stall_warning_s: float = 0) -> None:
        """See `EngineGroup.start`. Then call `warn_of_stalls` with `stall_warning_s`."""
        super().start(options)
        self.warn_of_stalls(stall_warning_s)

    def warn_of_stalls(self, stall_warning_s: float) -> None:
        """If a call takes longer than `stall_warning_s` seconds, rank 0 logs which ranks wait in the call. 0: no warnings.

        Groups that are made from this group later get this limit, too.
        """
        self._stall_warning_s = stall_warning_s
        # A group of one waits for nobody.
        status_post = self._transport.status_post() if self.size > 1 and stall_warning_s > 0 else None
        if status_post is not None:
            self._stall_watch = StallWatch(self.recorder, status_post, stall_warning_s)
            call_now_and_then(self._stall_watch)

    # ---- calls ----

    @override
    def _issue(
        self, signature: Signature, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], async_op: bool
    ) -> Work:
        # A barrier moves no tensor, so it has no plan.
        body = self._meet if signature.name == "barrier" else self._move
        return self._start(signature, reads, writes, body, async_op)

    def _start(
        self,
        signature: Signature,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        body: Body,
        async_op: bool = False,
        *,
        is_numbered: bool = True,
    ) -> Work:
        """Run a call on this thread, or queue the call. See [1] in `HostGroup`.

        `body` uses only `reads` and `writes`. If `is_numbered` is False, the call is not in the history that the ranks compare.
        """
        if self._closed:
            raise self._refusal(signature)
        queue = self._queue
        issued = queue.issue(signature.name, self.place) if is_numbered else queue.issued
        mark = self._take_mark() if self._marks and is_numbered else None
        call = Call(signature, next(self._numbers) if is_numbered else None, reads, writes, mark=mark)
        self.recorder.add(call)
        order = self._order_on_device(reads, writes)
        # [1] If no call is in flight, this call runs here, and its work is over at once.
        try:
            has_run = not async_op and queue.run_here(self._run, call, body, order)
        except BaseException:
            self._note_failure_is_seen()
            raise
        if has_run:
            # The host is done, but the device may not be: the caller's streams must wait for the copy back.
            if order is not None:
                order.join()
            return FinishedWork(list(writes))
        work = GroupWork(list(writes), lambda: f"{call} on {self.place()}", queue, issued, order, self._note_failure_is_seen)
        self._in_flight.add(work)
        # A group of one waits for no other rank, so the call is short. Waking another thread would take longer.
        is_short = self.size == 1 and order is None
        if is_short and queue.run_here(self._run_into, work, call, body, order):
            return work
        if not queue.enqueue(lambda: self._run_into(work, call, body, order)):  # the queue was stopped
            self._in_flight.discard(work)
            if self._closed:  # another thread has just closed the group
                raise self._refusal(signature)
            raise GroupClosedError(
                f"{signature.name} on {self.place()}: the process ends, and the group's thread has ended before"
            )
        # Calls that were in flight came first, so this one was queued although the caller wants to wait.
        if not async_op:
            work.wait()
        return work

    def _order_on_device(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> StreamOrder | None:
        if self._device is None:
            return None
        owned = [tensor for tensor in (*reads, *writes) if self._device.owns(tensor)]
        # A group with a device also carries calls that use host tensors only.
        return self._device.order(owned) if owned else None

    def _run_into(self, work: GroupWork, call: Call, body: Body, order: StreamOrder | None) -> None:
        try:
            # If an interrupt ended this method, the queue runs it again, but the call must not run twice. `_run` refuses a call
            # that has failed, because the group has failed, too.
            if call.state != DONE:
                self._run(call, body, order)
            work.succeed()
        except BaseException as error:
            work.fail(error)  # a waiter on another thread must get any error
            # Raise an interrupt such as Ctrl-C here, because no wait may raise it: the interrupted thread may wait for a later
            # work, or this work may have succeeded before. (The queue's thread gets no interrupts, and must go on.)
            is_interrupt = not (isinstance(error, Exception) or self._queue.is_own_thread())
            if is_interrupt or work.has_succeeded():
                raise
        # Not earlier, because `abort` ends only the works in this set.
        self._in_flight.discard(work)

    def _run(self, call: Call, body: Body, order: StreamOrder | None) -> None:
        """Run one call to its end. If the call fails, its error is the group's first failure. See [2] in `HostGroup`."""
        # While the call waits, `CancelScope.check` calls `ask` every 10 ms, and raises the error that `ask` returns. The
        # monitor asks only whether a rank is lost (`reason_to_give_up`), and may cancel the scope first; see Note [Who ends a
        # call] in `health.monitor`.
        ask = self.reason_to_give_up if call.number is None else self._why_call_cannot_end
        call.scope = CancelScope(self.timeout_s, ask)
        # `abort` sets the first failure, then cancels the running call. Here the order is the other way round: set the running
        # call, then look at the failure. So either `abort` finds the call, or the call finds the failure.
        self._running = call
        # The group failed after this call was issued. The call's tensors must not be touched.
        if self._first_failure is not None:
            self._running = call.scope.ask = None
            call.is_over(FAILED)
            raise self._words.not_started(call, self._first_failure)
        # A call without a number may run on some ranks only, so the group does not compare the call.
        comparison = Comparison.NONE if call.number is None else self._comparison
        try:
            self.recorder.begin(call)
            if comparison is Comparison.LATER:
                self._agreed.add(call.digest())
            elif comparison is Comparison.BEFORE:
                self._check_same_call(call, call.scope)
            # Usually the tensors are on the host and need no context. These tests cost less than entering contexts.
            if order is None and not is_tracked(call.reads) and not is_tracked(call.writes):
                body(call)
            else:
                with nullcontext() if order is None else order.entered(), untracked():
                    body(call)
            if comparison is Comparison.LATER and self._agreed.is_due:
                self._agreed.same_history(call.scope)
            call.is_over(DONE)
        except BaseException as error:  # noqa: BLE001 - raised again
            self._fail(error, call)
        finally:
            self._running = None
            call.scope.ask = None  # the recorder keeps the call; `ask` would keep the group
        if self._first_failure is not None:  # the group was aborted while the call ran
            raise self._first_failure

    def _move(self, call: Call) -> None:
        """Run the plan of a call: see [3] in `HostGroup`. For `part` and `whole`, see `tensors.layout.pack`."""
        signature = call.signature
        # Do not use `setdefault`: it would make a plan at every call.
        plan = self._plans.get(signature) or self._make_plan(signature)
        # Only an all-to-all has splits, and no rank can see from its own splits whether the splits of all ranks match.
        if signature.splits is not None and self.size > 1:
            self._check_same_splits(call)
        part, whole = pack(signature.name, call.reads, call.writes, self.size)
        plan.run(part, whole, call)
        unpack(signature.name, part, whole, call.writes, is_root=signature.root == self.rank)

    @override
    def _new_plan(self, signature: Signature) -> Plan:
        return self._transport.plan(signature)

    # ---- agreement ----

    def _check_same_splits(self, call: Call) -> None:
        """Check that the splits of all ranks match. Cost: an all-gather of two numbers for each pair of ranks."""
        expected, sent = call.signature.splits or ((), ())
        # Every rank sends 2 * size numbers, so this all-gather works even if the splits disagree.
        mine = torch.tensor([*expected, *sent], dtype=torch.int64, device="cpu")
        block = empty_block(mine, self.size)
        signature = Signature.of("all_gather_into_tensor", mine, detail=f"splits of {call.signature.name}")
        (self._plans.get(signature) or self._make_plan(signature)).run(mine, block, call)
        problem = different_splits(block.view(self.size, 2, self.size).tolist())
        if problem is not None:
            raise DisagreementError(problem)

    @override
    def agree_on_calls(self, *, async_op: bool = False) -> Work | None:
        if self._comparison is not Comparison.LATER:
            return None
        # This call is not in the history, but all ranks issue it. So count it: if the program attaches a callback to an earlier
        # call after this call, the callback is late.
        self._queue.issue("agree_on_calls", self.place)
        return self._start(
            Signature("agree_on_calls"), (), (), lambda call: self._agreed.same_history(call.scope), async_op, is_numbered=False
        )

    def _meet(self, call: Call) -> None:
        self._transport.barrier(call)
        if self._comparison is Comparison.LATER:
            self._agreed.same_history(call.scope)

    # ---- memory ----

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """See `ProcessGroup.allocate`. An allocation of host memory waits for its turn, like a collective."""
        # The transport has fast memory only on the host; torch allocates the rest.
        if torch.device(device).type != "cpu":
            return super().allocate(numel, dtype, device)
        self._refuse_if("allocate", checks.no_size(numel, dtype))
        numel = int(numel)  # transports calculate with it
        made: list[torch.Tensor] = []

        def body(call: Call) -> None:
            with torch.inference_mode(False):  # a tensor made in inference mode cannot hold gradients
                made.append(self._transport.allocate(numel, dtype, call))

        self._start(Signature("allocate", detail=f"numel={numel}, dtype={dtype}"), (), (), body)
        return made[0]

    # ---- two ranks ----

    @override
    def _send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work:
        signature = Signature.of("send", tensor, detail=f"dst={dst}, tag={tag}")
        self._check_usable(signature)
        request = self._transport.start_send(flat(in_plain_order(tensor)), dst, tag)
        return self._transfer(signature, request, tensor, lambda: None, [dst], async_op)

    @override
    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work:
        signature = Signature.of("recv", tensor, detail=f"src={'any' if src is None else src}, tag={tag}")
        self._check_usable(signature)
        wire = in_plain_order(tensor)
        order = None if wire is tensor else self._order_on_device((), (tensor,))
        request = self._transport.start_recv(flat(wire), src, tag)

        def deliver() -> None:
            with ExitStack() as entered:
                # The copy may run on the future's thread, whose current stream is not the program's. Any stream may use the
                # tensor next.
                if order is not None and self._device is not None:
                    entered.enter_context(order.entered())
                    entered.callback(self._device.finish, tensor)
                unpack("recv", wire, None, (tensor,))

        # A receive from any rank gives up only when no rank is left that could send.
        senders = [other for other in range(self.size) if other != self.rank] if src is None else [src]
        return self._transfer(signature, request, tensor, deliver, senders, async_op)

    def _transfer(
        self,
        signature: Signature,
        request: Request,
        tensor: torch.Tensor,
        deliver: Callable[[], object],
        peers: Sequence[int],
        async_op: bool,
    ) -> Work:
        sources = [source for source in (self._leavers, self._liveness) if source is not None]

        def ask() -> TransportError | None:
            # After the group's end, the other rank may never come, and nobody else ends this wait. (`abort` sets the first
            # failure a moment after `_is_over`.)
            if self._first_failure is not None or (self._is_over and self._is_closing):
                self._note_failure_is_seen()
                return self._words.ended(self._first_failure)
            # In a group of one there is no peer that could be lost.
            if not peers:
                return None
            return next(filter(None, (source.transfer_reason_to_give_up(peers) for source in sources)), None)

        work = TransferWork(
            request,
            [tensor],
            deliver,
            lambda: f"{signature} on {self.place()}",
            self.timeout_s,
            ask=ask,
            explain=lambda error: None if self._liveness is None else self._liveness.loss_behind(error),
        )
        if not async_op:
            work.wait(self.timeout_s)
        return work

    # ---- groups of some of the ranks ----

    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None:
        made: list[HostGroup] = []

        def body(call: Call) -> None:
            # A negative number stands for no color, because ranks exchange integers here.
            mine = torch.tensor([-1 if color is None else color, key], dtype=torch.int64, device="cpu")
            block = empty_block(mine, self.size)
            self._transport.plan(Signature.of("all_gather_into_tensor", mine)).run(mine, block, call)
            number = next(self._splits_made)
            # A rank without a color takes part in the all-gather, but is in no new group.
            if color is not None:
                members = members_of(color, block.view(self.size, 2).tolist())
                made.append(self._part(members, f"{self.name}/{number}.{color}", number, timeout_s, call.scope))

        self._start(Signature("split"), (), (), body)
        return made[0] if made else None

    def _subset(self, members: list[int], name: str, timeout_s: float) -> ProcessGroup:
        made: list[HostGroup] = []
        # The members cannot agree on a number here, because the other ranks do not take part. So the name gives the number.
        number = crc32(name.encode())
        self._start(
            Signature("subset", detail=f"members={members}"),
            (),
            (),
            lambda call: made.append(self._part(members, name, number, timeout_s, call.scope)),
            is_numbered=False,
        )
        return made[0]

    def _part(self, members: list[int], name: str, number: int, timeout_s: float, scope: CancelScope) -> HostGroup:
        transport = self._transport.subset(members, name, number, scope)
        rank = members.index(self.rank)
        liveness = self._liveness
        made = HostGroup(
            transport,
            rank,
            len(members),
            name=name,
            timeout_s=timeout_s,
            ranks=[self.ranks[member] for member in members],
            device=self._device,
            check_calls=self._check_calls,
            leavers=None if self._leavers is None else self._leavers.part(name, members),
            liveness=None if liveness is None else liveness.part(members, rank, transport.lost_ranks),
        )
        made.recorder.members = tuple(self.recorder.members[member] for member in members)
        made.report_to(self._reporter)
        made.warn_of_stalls(self._stall_warning_s)
        return made

    # ---- the end ----

    @override
    def in_fork(self) -> None:
        super().in_fork()
        self._stall_watch = None
        for work in list(self._in_flight):
            if not work.is_completed():
                work.leave_to_parent(not_the_rank("wait", self.place()))
        self._transport.leave_to_parent()

    @override
    def _meet_before_close(self) -> None:
        if self.size > 1 and (self._comparison is Comparison.LATER or self._transport.closes_together):
            try:
                self._start(Signature("close"), (), (), self._meet_at_close, is_numbered=False)
            except BaseException as error:
                self._was_seen = True  # the program gets this error, so `_close` must not raise another error in its place
                failure = self._first_failure
                if failure is None or error.__cause__ is not failure:
                    raise
                # A call that was in flight has failed, so this call was not started. The failure itself says what happened.
                if not self._is_expected(failure):
                    raise failure from failure.__cause__

    def _meet_at_close(self, call: Call) -> None:
        """Compare all calls with the other ranks, and find out whether all ranks close the group.

        If a rank does not close the group in time, this method raises no error.
        """
        is_compared_now = self._comparison is Comparison.LATER
        scope = call.scope.within(_CLOSE_S if is_compared_now else _FREE_S, self._why_sender_will_not_send)
        try:
            if is_compared_now:
                self._agreed.same_history(scope, closes=True)
            else:
                self._check_same_call(call, scope)
            # All ranks close the group. Meet again after each rank has stopped sending status lines, because no status line may
            # arrive after the library is closed.
            self._stop_watching()
            self._agreed.meet(scope)
            self._all_close = True
        # Only a disagreement is an error here. The group closes in any case.
        except (TimeoutError, TransportError) as error:
            logger.info("close on %s: not all ranks of the group have closed it: %s", self.place(), error)

    @override
    def _close(self) -> None:
        """See `EngineGroup._close`.

        Raises:
            BaseException: the first failure, if the program has not seen it.
            CollectiveTimeout: calls in flight do not finish.
        """
        self._closed = True
        self._stop_watching()
        # A call that fails at its time limit first writes its report. Wait for this call: its error says more than our error.
        drained = self._queue.drain(self.timeout_s + LONGEST_REPORT_S)
        self._is_over = True
        self._plans.clear()
        self._queue.stop()
        failure, was_seen = self._first_failure, self._was_seen
        is_in_order = drained and failure is None
        # After a failure, or with calls still in flight, closing the library in order might wait for ever.
        if not is_in_order:
            self._transport.abort()
        # A rank that has not closed the group may still use the library's objects, so they stay until this process ends.
        elif self._all_close:
            self._close_transport()
        if is_in_order and self._leavers is not None:
            self._leavers.is_closed = True
            if self._all_close:
                self._leavers.forget()
        # Results since the failure are garbage, and a program that does not know of the failure would trust them.
        if failure is not None and not was_seen and not self._is_expected(failure):
            self._note_failure_is_seen()
            raise failure from failure.__cause__
        if failure is None and not drained and not was_seen:
            raise CollectiveTimeout(
                f"close on {self.place()}: the calls in flight did not finish within {self.timeout_s:g} s; wait for each work "
                "before you close the group"
            )

    def _close_transport(self) -> None:
        """Close the transport. The subclass `membership.ShrinkableGroup` also closes its reconnector."""
        self._transport.close()

    def _stop_watching(self) -> None:
        if self._stall_watch is not None:
            self._stall_watch.stop()
            self._stall_watch = None

    @override
    def _abort(self, failure: BaseException) -> None:
        self._stop_watching()
        self._was_seen = True  # the program gives up the calls in flight, so a `close` on another thread does not raise
        self._first_failure = failure
        running = self._running  # read once, because another thread may set it to None
        if running is not None:
            running.scope.cancel(failure)
        self._transport.abort()
        # Go through a copy, because a work that ends on the queue's thread removes itself meanwhile.
        for work in list(self._in_flight):
            work.fail(failure)
        self._queue.stop()

    # ---- failures ----

    def _fail(self, error: BaseException, call: Call) -> NoReturn:
        """Mark the group as failed, and raise the error of the call; see [4] in `HostGroup`."""
        call.scope.was_noticed = True  # so that the monitor gives this thread the time to write its report and its alarm
        call.is_over(FAILED)
        if error is self._first_failure:  # from `abort`, which has already told the other ranks
            _given_up.append(error)
            raise error
        if isinstance(error, TimeoutError) or not isinstance(error, SynclineError) or error is call.scope.reason:
            _given_up.append(error)  # the library may still run the call, and write to the call's tensors
        failure = self._reported(self._words.of(error, call, self.timeout_s))
        self._first_failure = failure
        logger.debug("%s on %s failed; the group runs no other call", call.signature.name, self.place())
        self._transport.give_up()
        # End the waits of other ranks, if the library can. Use another thread, because `interrupt` may block.
        if isinstance(failure, TransportError):
            with suppress(RuntimeError):  # no thread can start; the group's error matters more
                start_thread(threading.Thread(target=self._transport.interrupt, name="syncline-interrupt", daemon=True))
        self._on_failure(failure)
        if failure is error:
            raise error
        raise failure from failure.__cause__

    @override
    def _note_failure_is_seen(self) -> None:
        if self._first_failure is not None:
            self._was_seen = True

    def _on_failure(self, failure: BaseException) -> None:
        """Called once, when the group has failed. The subclass `membership.ShrinkableGroup` tells the other ranks here."""

    def _why_sender_will_not_send(self) -> TransportError | None:
        """Return an error if another rank is lost or has left the job, so that its message will never come."""
        lost = self.reason_to_give_up()
        if lost is not None or self._leavers is None:
            return lost
        # One rank that has left is enough here: the comparison needs a message of every rank.
        others = (peer for peer in range(self.size) if peer != self.rank)
        return next(filter(None, (self._leavers.transfer_reason_to_give_up([peer]) for peer in others)), None)

    def _why_call_cannot_end(self) -> TransportError | None:
        # A notice of a rank that left in order says more than the end of its process, so notices come first.
        reason = None if self._leavers is None else self._leavers.reason_to_give_up()
        # This rank's own knowledge comes before an alarm, because an alarm costs a request to the store.
        return reason or self.reason_to_give_up() or self._alarm()

    def _alarm(self) -> TransportError | None:
        """Return None. The subclass `ShrinkableGroup` returns an error if the group's store has an alarm of another rank."""
        return None

    # ---- for the monitor; see Note [Who ends a call] in `health.monitor` ----

    @property
    def running(self) -> Call | None:
        """The call that runs now, or None."""
        return self._running

    def reason_to_give_up(self) -> TransportError | None:
        """Return the error that names the lost ranks, or None if no rank is lost."""
        return None if self._liveness is None else self._liveness.reason_to_give_up()

    def interrupt(self) -> None:
        """Make the transport end the running call. The call then raises an error."""
        self._transport.interrupt()

    def missing_in_words(self) -> str:
        """Return a sentence about the running call, with the lost and stopped ranks; see `FailureWords.missing`."""
        return self._words.missing(self._running)

    def report(self, reason: str) -> None:
        """Write a report, if the group has a reporter. Wait at most 2 seconds for the report."""
        if self._reporter is not None:
            self._reporter.write_within(reason, _REPORT_S)


class GroupWork(PendingWork):
    """The work of a queued call. A callback of the same group may also wait for this work.

    `tell` is called when the program sees the error of this work, or has a future that raises the error.
    """

    __slots__ = ("_issued", "_order", "_queue", "_tell", "_was_waited_for")

    def __init__(
        self,
        tensors: list[torch.Tensor],
        describe: Callable[[], str],
        queue: Queue,
        issued: int,
        order: StreamOrder | None,
        tell: Callable[[], None],
    ) -> None:
        super().__init__(tensors, describe)
        self._tell = tell
        self._queue = queue
        self._issued = issued
        self._order = order
        self._was_waited_for = False

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the call is finished.

        In two cases, the waiting thread itself runs the queued calls, up to this call: in a callback of the group, or if
        `timeout` is None and no other thread runs a call.
        """
        if self._queue.is_running_here():
            # Inside a callback this thread has the turn, so no other thread can run the queued call.
            self._queue.run_until(self.is_completed)
        elif timeout is None and not modes_active():  # calls that run here ignore `timeout`, and modes see them
            self._queue.help(self.is_completed)
        try:
            super().wait(timeout)
        finally:
            if self._error is not None:
                self._tell()
        self._was_waited_for = True
        if isinstance(self._future, GuardedFuture):
            self._future.was_waited_for = True
        # The host is done, but the caller's streams must still wait for the group's streams.
        if self._order is not None:
            self._order.join()
        return True

    @override
    def fail(self, error: BaseException) -> None:
        super().fail(error)
        # The program can see the error in the future.
        if self._future is not None:
            self._tell()

    @override
    def exception(self) -> BaseException | None:
        if self._error is not None:
            self._tell()
        return self._error

    @override
    def get_future(self) -> TensorsFuture:
        future = super().get_future()
        # Look only after the future is set: if the call fails later, `fail` finds the future.
        if self._error is not None:
            self._tell()
        return future

    def has_succeeded(self) -> bool:
        """Whether the call has ended without an error."""
        return self._is_done and self._error is None

    @override
    def _new_future(self) -> GuardedFuture:
        future = GuardedFuture(self._queue, self._issued, devices_of(self._tensors))
        future.was_waited_for = self._was_waited_for
        return future

    def _complete(self, future: TensorsFuture) -> None:
        """Complete the future, which runs its callbacks. See point 5 of Note [One total order] in `queue`."""
        # If `help` does not run this call, or the queue has stopped, run the callbacks on this thread.
        if not self._queue.hand_over(lambda: self._complete_here(future)):
            self._complete_here(future)

    def _complete_here(self, future: TensorsFuture) -> None:
        with nullcontext() if self._order is None else self._order.resumed():
            super()._complete(future)
