"""A group that runs its calls one after the other: the total order, time limits and failures, once for all host backends."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from typing_extensions import override

from ..contract.collective import Collective
from ..contract.deadline import Deadline
from ..contract.process_group import ProcessGroup
from ..contract.running_call import RunningCall
from ..contract.work import FinishedWork, PendingWork, Work
from ..errors import CollectiveTimeout, GroupClosedError, MisuseError, RankLostError, SynclineError, TransportError
from ..failures.call_record import DONE
from ..failures.flight_recorder import NUMBER, STATE, Entry, FlightRecorder
from ..failures.liveness import Liveness
from ..failures.report import Reporter, reported
from ..failures.report_signal import report_on_signal
from ..failures.stall_watch import StallWatch, look_now_and_then
from ..failures.watchdog import watch
from ..forks import Inherited, not_the_rank, tell_in_forks
from .call_verification import verify_call
from .callback_order import CallbackOrder
from .control_messages import TransportMessages
from .departures import GroupCalls
from .device_runtime import Body, DeviceRuntime, StreamOrder
from .group_start import agree_on_start
from .group_work import GroupWork
from .history_verification import HistoryVerification
from .progress import Progress
from .runnable import IssuedCall, KeptPlan, PlanKey, Runnable
from .transport import Transport

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger("syncline.collectives")

_CPU = frozenset({"cpu"})

# How long a rank that closes a group waits for the others, to compare what they have called.
_CLOSE_S = 60.0
# How long the end of a process waits for its report.
_REPORT_S = 2.0

# A library may go on writing to the tensors of a collective that was given up, so their memory must not be freed at once. The
# tracebacks of these errors hold the frames that hold the tensors, and their copies in plain order.
#
# Only the latest are kept. A group fails once: after its first failure it starts no other collective, and its transport is
# told to give up. So the oldest of them belongs to a group after which as many others have failed; a job that makes a new
# group after each failure must not need more memory each time.
GIVEN_UP_KEPT = 16
_given_up: deque[BaseException] = deque(maxlen=GIVEN_UP_KEPT)


class SerialGroup(ProcessGroup, Inherited):
    """Runs the blocking calls of a `Transport` in one total order; see Note [One total order] in `progress`.

    A collective with `async_op=False` runs on the caller's thread when nothing is in flight (a hop to another thread costs
    more than a small collective), otherwise it is queued and waited for. `send` and `recv` have no place in that order: they
    start at once on the caller's thread. After a failed collective the transport's state is unknown, so every later one fails
    with a reference to the first failure.

    Args:
        transport: moves the tensors.
        device: of whose tensors, beside the host's, the transport takes (see `DeviceDispatchTransport`). Note [Order on the
            device] in `host.device_runtime` says how a collective fits among what the device does.
        check_calls: the ranks compare what they are about to do before each collective.
        calls: says who has left the job; None where nobody tells. See Note [Who will not come] in `departures`.
        liveness: says which ranks are lost; None where nobody can know. With it, the process's watchdog looks at the calls.

    Attributes:
        recorder: of the last calls.
        losses_are_expected: whether somebody goes on after a `TransportError`, so that it shall write no report.
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
        calls: GroupCalls | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        super().__init__(rank, size, name=name, timeout_s=timeout_s, ranks=ranks)
        self._calls = calls
        self._liveness = liveness
        self._transport = transport
        self._check_calls = check_calls
        self._device = device
        self._device_types = _CPU if device is None else _CPU | {device.device_type}
        self._progress = Progress(f"syncline-{name}-rank{rank}")
        weakref.finalize(self, self._progress.drop).atexit = False
        self._sequence = itertools.count()
        self._callbacks = CallbackOrder()
        self._splits_made = itertools.count()
        self._closed = False
        self._is_in_fork = False
        self._companions: list[ProcessGroup] = []
        self._first_failure: BaseException | None = None
        self._in_flight: set[PendingWork] = set()
        self._plans: dict[PlanKey, KeptPlan] = {}
        self._deadline: Deadline | None = None  # of the collective that runs now
        self.recorder = FlightRecorder(name, rank, self.ranks, None if calls is None else calls.count)
        self._reporter: Reporter | None = None
        self.losses_are_expected = False
        self._stall_warning_s = 0.0
        self._stall_watch: StallWatch | None = None
        is_verified = size == 1 or check_calls or transport.verifies_every_call
        self._verification = (
            None if is_verified else HistoryVerification(TransportMessages(transport, rank, size), rank, self.recorder)
        )
        if liveness is not None:
            watch(self)
        if calls is not None:
            calls.belong_to(self)
        tell_in_forks(self)

    @property
    def backend_name(self) -> str:
        """The transport's name in the registry."""
        return self._transport.backend_name

    @property
    def device_types(self) -> frozenset[str]:
        """The CPU, and the device that the group was made with."""
        return self._device_types

    @override
    def describe(self) -> str:
        return self._transport.describe()

    @override
    def meeting_store(self) -> dist.Store | None:
        return self._transport.meeting_store()

    def start(self, options: Mapping[str, object], stall_warning_s: float = 0) -> None:
        """Compare options with the other ranks, and report failures from now on. All ranks call it, before anything else.

        Args:
            options: what changes how the ranks communicate.
            stall_warning_s: after so many seconds in one call rank 0 logs who waits for whom; 0: never.

        Raises:
            DisagreementError: the ranks were given different options.
        """
        messages = TransportMessages(self._transport, self.rank, self.size)
        job = agree_on_start(messages, self.rank, self.size, options, Deadline(self.timeout_s))
        reporter = Reporter(job, self.rank, self.size)
        self.report_to(reporter)
        self.warn_of_stalls(stall_warning_s)
        report_on_signal(reporter)

    @property
    def reporter(self) -> Reporter | None:
        """Who reports the group's failures."""
        return self._reporter

    def report_to(self, reporter: Reporter | None) -> None:
        """Let the first failure of this group, and of groups made of it from now on, be reported; None: not."""
        self._reporter = reporter
        if reporter is not None:
            reporter.watch(self.recorder)

    def warn_of_stalls(self, stall_warning_s: float) -> None:
        """Let rank 0 log who waits for whom, in this group and in groups made of it from now on; 0: not."""
        self._stall_warning_s = stall_warning_s
        status_post = self._transport.status_post() if self.size > 1 and stall_warning_s > 0 else None
        if status_post is not None:
            self._stall_watch = StallWatch(self.recorder, status_post, stall_warning_s)
            look_now_and_then(self._stall_watch)

    @override
    def verify_calls(self, *, async_op: bool = False) -> Work | None:
        verification = self._verification
        if verification is None:
            return None

        def body(running: RunningCall) -> None:
            verification.verify(running.deadline)

        return self._issue(Collective("verify_calls"), [], (), body, async_op, is_numbered=False)

    def close(self) -> None:
        """Run what was issued, compare the calls with those of the other ranks, then close the transport.

        Raises:
            DisagreementError: the ranks have made different calls.
            MisuseError: it was called from a future's callback, which is part of what it would wait for.
        """
        if self._progress.is_running_here():
            raise MisuseError(f"close on {self.place()} was called from a future's callback; call it after wait(), or abort()")
        if self._closed:
            return
        with ExitStack() as ending:  # from the last one on, also after one that raises
            ending.callback(self._close)
            for companion in self._companions:
                ending.callback(self._end, companion)
            if self._first_failure is None:
                self._verify_at_close()

    def _end(self, companion: ProcessGroup) -> None:
        """Nobody may come to close the companion of a group that has failed."""
        if self._first_failure is None:
            companion.close()
        else:
            companion.abort()

    @override
    def end_together(self, companion: ProcessGroup) -> None:
        self._companions.append(companion)

    def _verify_at_close(self) -> None:
        """A rank that does not come is no failure: it may have ended without closing its groups, or still compute."""
        verification = self._verification
        if verification is None:
            return

        def body(running: RunningCall) -> None:
            try:
                verification.verify(Deadline(min(running.deadline.remaining_s(), _CLOSE_S), self._reason_not_to_wait))
            except (TimeoutError, TransportError) as error:
                logger.info("close on %s: calls were not compared with those of the other ranks: %s", self.place(), error)

        self._issue(Collective("close"), [], (), body, async_op=False, is_numbered=False)

    def _reason_not_to_wait(self) -> TransportError | None:
        """Why a rank that shall send something will not: it is lost, or has left the job."""
        lost = self.reason_to_give_up()
        if lost is not None or self._calls is None:
            return lost
        others = (peer for peer in range(self.size) if peer != self.rank)
        return next(filter(None, (self._calls.transfer_reason_to_give_up([peer]) for peer in others)), None)

    def _close(self) -> None:
        self._closed = True
        self._stop_watching()
        drained = self._progress.drain(self.timeout_s)
        self._plans.clear()
        self._progress.stop()
        if drained and self._first_failure is None:
            self._close_transport()
            if self._calls is not None:
                self._calls.is_closed = True
        else:
            self._transport.abort()

    def _close_transport(self) -> None:
        self._transport.close()

    def _stop_watching(self) -> None:
        if self._stall_watch is not None:
            self._stall_watch.stop()
            self._stall_watch = None

    def abort(self) -> None:
        """Fail what is in flight and everything queued behind it."""
        if self._closed:
            return
        self._closed = True
        self._stop_watching()
        self._plans.clear()
        for companion in self._companions:
            companion.abort()
        failure = self._first_failure = self._first_failure or self._aborted()
        running = self._deadline  # another thread may just end that call
        if running is not None:
            running.cancel()
        self._transport.abort()
        for work in list(self._in_flight):
            work.fail(failure)
        self._progress.stop()

    @override
    def in_fork(self) -> None:
        """As if it were closed, without a word to anybody. Without plans every call comes to `_check_open`."""
        self._closed = self._is_in_fork = True
        self._plans = {}
        self._stall_watch = None
        for work in list(self._in_flight):
            work.leave_to_parent(not_the_rank("wait", self.place()))
        self._progress.leave_to_parent()
        self._transport.leave_to_parent()

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
        if self._marks and is_numbered and not self.is_in_callback():
            call, body = self._marked(call, body)
        issued = self._callbacks.issue(call.name, self.place) if is_numbered else self._callbacks.issued
        sequence = next(self._sequence) if is_numbered else None
        entry = self.recorder.issue(sequence, *call, depth=3)
        tensors = (*outputs, *inputs)
        order = None if self._device is None else self._ordered_on(self._device, tensors)
        if order is not None:
            body = order.around(body)
        if self._check_calls and is_numbered:
            body = self._verified_first(body)
        issued_call = IssuedCall(call, body, tensors)
        if not async_op and self._progress.run_here(self._run, issued_call, None, None, entry):
            if order is not None:
                order.join()
            return FinishedWork(outputs)
        work = GroupWork(outputs, lambda: self._in_words(call, sequence), self._progress, order, self._callbacks, issued)
        self._in_flight.add(work)
        is_short = self.size == 1 and order is None  # nobody to wait for, and another thread would take longer to wake up
        if is_short and self._progress.run_here(self._run_into, work, issued_call, entry):
            return work
        if not self._progress.enqueue(lambda: self._run_into(work, issued_call, entry)):
            self._in_flight.discard(work)
            self._check_open(call)  # another thread has just closed the group
            raise GroupClosedError(f"{call.name} on {self.place()}: the process ends, and the group's thread has ended before")
        if not async_op:
            work.wait()
        return work

    def _ordered_on(self, device: DeviceRuntime, tensors: Sequence[torch.Tensor]) -> StreamOrder | None:
        owned = [tensor for tensor in tensors if device.owns(tensor)]
        return device.order(owned) if owned else None

    def _marked(self, call: Collective, body: Body) -> tuple[Collective, Body]:
        """A call with its mark. Plans do not know of marks, so a transport that compares each call meets once more before."""
        marked = self._with_mark(call)
        if marked is call or self._verification is not None or self._check_calls or self.size == 1:
            return marked, body

        def met_first(running: RunningCall) -> None:
            self._transport.barrier(running)
            body(running)

        return marked, met_first

    def _verified_first(self, body: Body) -> Body:
        def verified(running: RunningCall) -> None:
            verify_call(self._transport, self.size, running)
            body(running)

        return verified

    def _run_into(self, work: PendingWork, issued_call: IssuedCall, entry: Entry) -> None:
        try:
            self._run(issued_call, None, None, entry)
        except BaseException as error:  # noqa: BLE001 - a waiter on another thread must get it, whatever it is
            self._in_flight.discard(work)
            work.fail(error)
        else:
            self._in_flight.discard(work)
            work.succeed()

    def _run(self, task: Runnable, tensor: Any, whole: Any, entry: Entry) -> None:
        """Run one collective to its end. What goes wrong is the group's first failure."""
        recorder, sequence, verification = self.recorder, entry[NUMBER], self._verification
        interrupt = self._reason_to_give_up
        if sequence is None:  # not all ranks issue it
            verification, interrupt = None, self.reason_to_give_up
        # In this order: `abort` notes the failure first, then cancels the deadline that it finds.
        deadline = self._deadline = Deadline(self.timeout_s, interrupt)
        if self._first_failure is not None:
            self._deadline = None
            recorder.fail(entry)
            raise self._failed_before(task.collective(tensor), sequence)
        recorder.begin(entry)
        try:
            if verification is not None:
                verification.add(task.digest)
            task.run(tensor, whole, deadline)
            if verification is not None and verification.is_due:
                verification.verify(deadline)
            entry[STATE] = DONE
        except BaseException as error:  # noqa: BLE001 - raised again
            recorder.fail(entry)
            self._fail(error, task.collective(tensor), sequence, deadline)
        finally:
            self._deadline = None
        if self._first_failure is not None:
            raise self._first_failure  # it was aborted meanwhile

    def _fail(self, error: BaseException, call: Collective, sequence: int | None, deadline: Deadline) -> NoReturn:
        """A collective has failed: remember why, tell the other ranks, and raise it in the group's words."""
        failure = error
        if isinstance(error, TimeoutError):
            _given_up.append(error)
            if deadline.reason is not None:
                reason = self._with_lost_ranks(deadline.reason)
                failure = reason.reworded(f"{self._in_words(call, sequence)}: {reason}")
            else:
                failure = self._aborted() if deadline.was_cancelled else self._timed_out(call, sequence, error)
        elif isinstance(error, SynclineError):
            explained = self._with_lost_ranks(error)
            failure = explained.reworded(f"{self._in_words(call, sequence)}: {explained}")
            failure.__cause__ = error.__cause__ if explained is error else error
        else:
            _given_up.append(error)
        if not deadline.was_cancelled or deadline.reason is not None:
            failure = self._reported(failure)
        self._first_failure = failure
        logger.debug("%s on %s failed; the group runs no other collective", call.name, self.place())
        self._transport.give_up()
        if isinstance(failure, TransportError):  # those who wait elsewhere hear of it where a library can say so
            with suppress(RuntimeError):  # no thread can start; the group's error matters more
                threading.Thread(target=self._transport.interrupt, name="syncline-interrupt", daemon=True).start()
        if failure is error:
            raise error
        raise failure from failure.__cause__

    # ---- lost ranks; see Note [Who ends a call] in `failures.watchdog` ----

    @property
    def running_deadline(self) -> Deadline | None:
        """That of the collective that runs now."""
        return self._deadline

    def reason_to_give_up(self) -> TransportError | None:
        """That a rank is lost, if one is."""
        return None if self._liveness is None else self._liveness.reason_to_give_up()

    def interrupt(self) -> None:
        """Have the transport end the collective that runs."""
        self._transport.interrupt()

    def missing_in_words(self) -> str:
        """Which ranks are lost or stopped, as far as is known."""
        missing = () if self._liveness is None else (*self._liveness.lost(), *self._liveness.stopped())
        who = "it is not known which rank it waits for" if not missing else f"it waits for {self._named(missing)}"
        return f"a collective on {self.place()} did not end: {who}"

    def report(self, reason: str) -> None:
        """Write the report, if it can be done within a few seconds."""
        if self._reporter is not None:
            self._reporter.write_within(reason, _REPORT_S)

    def _reason_to_give_up(self) -> TransportError | None:
        reason = None if self._calls is None else self._calls.reason_to_give_up()
        return reason or self.reason_to_give_up()

    def _with_lost_ranks(self, error: SynclineError) -> SynclineError:
        """The loss of a rank, if that is why the transport failed; else the error, which names ranks that stand still."""
        if self._liveness is None or not isinstance(error, TransportError) or isinstance(error, RankLostError):
            return error
        lost = self._liveness.loss_behind(error)
        if lost is not None:
            return lost
        stopped = self._liveness.stopped()
        return error.reworded(f"{error}. {self._named(stopped)} stands still, stopped by a signal") if stopped else error

    def _named(self, ranks: Sequence[int]) -> str:
        return f"rank(s) {list(ranks)}" if self._liveness is None else self._liveness.in_words(ranks)

    def _reported(self, failure: BaseException) -> BaseException:
        """The failure, which says where this rank's report is, if it is ours and there is one."""
        if self.losses_are_expected and isinstance(failure, TransportError):
            return failure
        return reported(self._reporter, failure)

    def is_in_callback(self) -> bool:
        """Whether this thread runs a callback of one of the group's works."""
        return get_ident() in self._callbacks.running

    def _check_open(self, call: Collective) -> None:
        if self._is_in_fork:
            raise not_the_rank(call.name, self.place())
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
        stopped = () if self._liveness is None else self._liveness.stopped()
        who = f"{self._named(stopped)} stands still, stopped by a signal; {error}" if stopped else f"{error}"
        timeout = CollectiveTimeout(
            f"{self._in_words(call, sequence)}, did not finish within {self.timeout_s:g} s: {who}. Look for a rank that "
            "died, left early, or issued other collectives; or pass a longer timeout to init_process_group"
        )
        timeout.__cause__ = error
        return timeout

    def _failed_before(self, call: Collective, sequence: int | None) -> TransportError:
        error = TransportError(
            f"{self._in_words(call, sequence)}, was not started because the group had failed before: {self._first_failure}"
        )
        error.__cause__ = self._first_failure
        return error


def expect_losses(group: ProcessGroup, are_expected: bool) -> None:
    """Whether a group writes no report when a rank is lost, because its user goes on without that rank."""
    if isinstance(group, SerialGroup):
        group.losses_are_expected = are_expected
