"""EngineGroup is the base class of the groups that carry out calls themselves: `HostGroup` and `NcclGroup`."""

from __future__ import annotations

import itertools
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from threading import get_ident

import torch
from typing_extensions import override

from ..errors import (
    CollectiveTimeout,
    GroupClosedError,
    MisuseError,
    SynclineError,
    TransportError,
    with_details,
)
from ..forks import Inherited, not_the_rank, tell_in_forks
from ..group import ProcessGroup
from ..health.agreement import Agreement, Carrier, Comparison
from ..health.liveness import Liveness, note_run
from ..health.recorder import CallCount, Recorder
from ..health.report import Reporter, report_on_signal
from ..health.statements import different_calls
from .call import Call, Signature
from .cancel_scope import CancelScope
from .failure import FailureWords
from .queue import Queue, a_queue_runs_here, release_if_held
from .transport import Plan

MOST_PLANS = 256

# How long a call that has failed waits for its report to be written, before it raises its error.
LONGEST_REPORT_S = 10.0


class EngineGroup(ProcessGroup, Inherited):
    """The base class of the groups that carry out calls themselves, instead of passing them on to other groups.

    The group keeps a `Plan` for each signature, a record of the last calls (`recorder`), the first failure, and a digest of all
    calls. The ranks compare their digests.

    Args:
        carrier: exchanges numbers and texts between the ranks.
        check_calls: whether the ranks compare each call, with its shapes, before the call runs.
        transport_compares: whether the transport compares every call. See Note [Comparison of calls] in `health.agreement`.
        count: counts the calls that have begun. None: make a new counter.
        liveness: finds out which ranks are lost; None if the group cannot find this out.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        carrier: Carrier,
        *,
        name: str,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
        check_calls: bool = False,
        transport_compares: bool = False,
        count: CallCount | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        super().__init__(rank, size, name=name, timeout_s=timeout_s, ranks=ranks)
        self._words = FailureWords(self.place(), liveness)
        self._queue = Queue(f"syncline-{name}-rank{rank}")
        weakref.finalize(self, self._queue.drop).atexit = False
        self._plans: dict[Signature, Plan] = {}
        self._numbers = itertools.count()
        self._splits_made = itertools.count()
        self._companions: list[ProcessGroup] = []
        self._closed = False  # the group takes no new calls
        self._is_over = False  # no call is left that `abort` could end
        self._is_replaced = False  # `shrink` or `admit` has made a newer group
        self._is_closing = False
        self._closing = threading.RLock()  # held while a thread closes the group
        self._is_in_fork = False
        self._reporter: Reporter | None = None
        self._losses_are_expected = False
        self.recorder = Recorder(name, rank, self.ranks, count)
        self._carrier = carrier
        self._agreement = None if size == 1 else Agreement(carrier, rank, self.recorder)
        self._check_calls = check_calls  # for groups made from this group
        self._comparison = Comparison.of(size, check_calls=check_calls, transport_compares=transport_compares)
        tell_in_forks(self)

    @property
    @abstractmethod
    def first_failure(self) -> BaseException | None:
        """The error that has ended the group; None while the group works."""

    @override
    def algorithm_of(self, name: str, tensor: torch.Tensor) -> str | None:
        # Look at the newest plan first, because such tensors may have several plans, with different reductions or roots. Look
        # at a copy, because the group's thread may add a plan meanwhile.
        wanted = (name, tensor.dtype, tensor.shape)
        for signature, plan in reversed(list(self._plans.items())):
            if (signature.name, signature.dtype, signature.shape) == wanted:
                return plan.algorithm
        return None

    @override
    def is_in_callback(self) -> bool:
        return self._queue.is_in_callback()

    # ---- start ----

    def start(self, options: Mapping[str, object]) -> None:
        """Check that all ranks have the same options. From now on, write a report if the group fails.

        All ranks call this method before any other method.

        Raises:
            DisagreementError: the ranks were given different options.
        """
        # A group of one rank has no agreement of its own, but needs a name for its run.
        agreement = self._agreement or Agreement(self._carrier, 0, self.recorder)
        reporter = Reporter(agreement.on_start(options, CancelScope(self.timeout_s)), self.rank, self.size)
        self.report_to(reporter)
        report_on_signal(reporter)
        note_run(reporter.run_name, self.rank, self.size)

    @override
    def exchange_texts(self, text: str) -> list[str]:
        try:
            said = self._carrier.statements(text, CancelScope(self.timeout_s), most_told=None)
        except TimeoutError as error:
            raise CollectiveTimeout(
                f"{self.place()} has connected, but not all ranks told each other their hosts: {error}"
            ) from error
        return [text for _, text in sorted((rank, text) for text, ranks in said.ranks.items() for rank in ranks)]

    def report_to(self, reporter: Reporter | None) -> None:
        """From now on, `reporter` writes the report if this group fails. None turns reports off.

        Groups that are made from this group after this call get the same reporter.
        """
        self._reporter = reporter
        if reporter is not None:
            reporter.watch(self.recorder)

    @property
    def reporter(self) -> Reporter | None:
        """The reporter of the group's failures; None if there are no reports."""
        return self._reporter

    # ---- plans ----

    @abstractmethod
    def _new_plan(self, signature: Signature) -> Plan:
        """Make the plan for calls of this signature. The method does not communicate."""

    def _make_plan(self, signature: Signature) -> Plan:
        plan = self._new_plan(signature)
        if len(self._plans) >= MOST_PLANS:  # the program uses new shapes all the time, so old plans are of little use
            self._plans.clear()
        # After `abort`, a call that still runs must not fill the plans again.
        if not self._closed:
            self._plans[signature] = plan
        return plan

    def _take_mark(self) -> str | None:
        return self._marks.pop(get_ident(), None) if self._marks and not self._queue.is_in_callback() else None

    @property
    def _agreed(self) -> Agreement:
        assert self._agreement is not None
        return self._agreement

    def _check_same_call(self, call: Call, scope: CancelScope) -> None:
        """Compare a call, with its shapes, before it runs: see `Comparison.BEFORE`. All ranks call this method.

        Raises:
            DisagreementError: the ranks call different collectives. All ranks raise this error.
        """
        said = self._agreed.same(call.words, scope)
        if said is not None:
            raise different_calls(said)

    # ---- failures ----

    def _refusal(self, signature: Signature) -> GroupClosedError:
        if self._is_in_fork:
            return not_the_rank(signature.name, self.place())
        # A script may still use the old group after `shrink` or `admit`. Then the error points to the newer group.
        return self._words.replaced(signature) if self._is_replaced else self._words.closed(signature)

    def _check_usable(self, signature: Signature) -> None:
        if self._closed:
            raise self._refusal(signature)
        failure = self.first_failure
        if failure is not None:
            self._note_failure_is_seen()  # this error names the failure
            raise self._words.not_started(signature, failure)

    @abstractmethod
    def _note_failure_is_seen(self) -> None:
        """Store that the program has seen the first failure, if there is one. Then `close` does not raise this failure."""

    def _reported(self, failure: BaseException) -> BaseException:
        """Write a report of `failure`, unless reports are off. Return `failure`, or a copy that names the report's folder."""
        # A report for each expected loss would hide the real failures.
        if self._is_expected(failure):
            return failure
        if self._reporter is None or not isinstance(failure, Exception):  # no report after Ctrl-C
            return failure
        folder = self._reporter.write_within(f"{type(failure).__name__}: {failure}", LONGEST_REPORT_S)
        # No report was written, or the failure is an exception of another library, so leave its text unchanged.
        if folder is None or not isinstance(failure, SynclineError):
            return failure
        return failure.reworded(
            with_details(str(failure), f"Each rank that fails writes what it knows to {folder}; read it with `syncline report`")
        )

    def _is_expected(self, failure: BaseException) -> bool:
        """Whether `failure` is a `TransportError` after which the program goes on; see `expect_losses`."""
        return self._losses_are_expected and isinstance(failure, TransportError)

    @override
    def expect_losses(self, are_expected: bool) -> None:
        self._losses_are_expected = are_expected

    # ---- the end ----

    @override
    def in_fork(self) -> None:
        """Mark the group as closed in a forked child, without locks and without communication. See Note [Forks] in `forks`."""
        self._closed = self._is_over = self._is_in_fork = True
        self._plans = {}
        self._closing = threading.RLock()  # a thread that does not exist in the child may hold the old lock
        self._queue.leave_to_parent()

    def close(self) -> None:
        """Finish all calls, compare the calls with the other ranks, then release the group's connections and memory.

        All ranks call this method. The ranks wait for one another in two cases:

        - If the ranks compare their calls later (`Comparison.LATER`), they compare all calls now, in at most 60 seconds (5 with
          NCCL).
        - If the ranks must close the library's objects together, as with MPI, they wait at most 5 seconds.

        If a rank does not come in time, this method raises no error, but communicators of MPI stay open until the process ends.
        If the missing rank makes a further call instead, this further call fails at its time limit at the latest. Over Gloo,
        the call fails when this rank's connections close; over MPI, when this rank leaves the job.

        Raises:
            DisagreementError: the ranks have made different calls. Or, over MPI with `check_calls`, another rank makes a
                further call while this rank closes.
            SynclineError: a call has failed or does not finish, and the program has not seen the error. The program has seen
                the error if it waited for the work, asked for the work's future, or got an error from a later call. After
                `expect_losses(True)`, this method raises no `TransportError` of a call.
            MisuseError: the method was called in a callback of this group.
        """
        if self._queue.is_running_here():
            raise MisuseError(f"close on {self.place()} was called from a future's callback; call it after wait(), or abort()")
        # A callback of another group must not wait for a thread that closes this group: that thread may wait for the callback.
        may_wait = not a_queue_runs_here()
        try:
            if not self._closing.acquire(blocking=may_wait):
                return
        except BaseException:
            release_if_held(self._closing)
            raise
        try:
            # Another thread has closed the group meanwhile. Or this thread is closing it, and a signal's handler calls `close`.
            if self._closed or self._is_closing:
                return
            self._is_closing = True
            # The stack runs its callbacks in reverse order, also after an error: first the companions, last `_close`.
            with ExitStack() as ending:
                ending.push(abort_if_interrupted(self))
                ending.callback(self._close)
                for companion in self._companions:
                    ending.push(abort_if_interrupted(self))
                    ending.callback(self._end, companion)
                ending.push(abort_if_interrupted(self))
                # After a failure, other ranks may not come to this comparison, so it could only time out.
                if self.first_failure is None:
                    self._meet_before_close()
        finally:
            self._closing.release()

    @abstractmethod
    def _meet_before_close(self) -> None:
        """Wait until the other ranks close the group, too, and compare all calls with them. Some groups do nothing here."""

    @abstractmethod
    def _close(self) -> None:
        """Set `_closed`, finish all calls, set `_is_over`, and release everything the group holds."""

    def _end(self, companion: ProcessGroup) -> None:
        if self.first_failure is None:
            companion.close()
        else:
            # Other ranks may not come to close the companion.
            companion.abort()

    @override
    def end_together(self, companion: ProcessGroup) -> None:
        self._companions.append(companion)

    def abort(self) -> None:
        """End the group at once. The running call and all queued calls fail."""
        if self._is_over:
            return
        self._closed = self._is_over = True
        self._plans.clear()
        for companion in self._companions:
            companion.abort()
        # A group that has failed already keeps its first failure as the reason.
        self._abort(self.first_failure or self._words.aborted())

    @abstractmethod
    def _abort(self, failure: BaseException) -> None:
        """Make all calls in flight fail, without waiting. The caller has set `_closed`."""


def abort_if_interrupted(group: ProcessGroup) -> Callable[[object, BaseException | None, object], None]:
    """Return a function for an `ExitStack` that closes a group. The function aborts the group if Ctrl-C has ended a step.

    After Ctrl-C, the other steps must not wait for calls in flight, which may take the group's whole time limit.
    """

    def leave(_: object, error: BaseException | None, __: object) -> None:
        if error is not None and not isinstance(error, Exception):
            group.abort()

    return leave


def members_of(color: int, colors_and_keys: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks with this color, in the order of their keys. Equal keys are in the order of ranks. A pure function."""
    chosen = [(key, rank) for rank, (given, key) in enumerate(colors_and_keys) if given == color]
    return [rank for _, rank in sorted(chosen)]
