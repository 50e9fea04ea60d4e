"""The texts of a group's errors."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CollectiveTimeout, GroupClosedError, RankLostError, SynclineError, TransportError, in_words, with_details
from ..health.liveness import Liveness
from .call import Call, Signature


class FailureWords:
    """Turns errors of a transport into errors of a group that name the call and the lost ranks.

    `place` names this rank and the group.
    """

    def __init__(self, place: str, liveness: Liveness | None) -> None:
        self._place = place
        self._liveness = liveness

    def of(self, error: BaseException, call: Call, timeout_s: float) -> BaseException:
        """Return the error that the group raises after `error` has ended a call.

        - A `TimeoutError` of the transport becomes a `CollectiveTimeout`.
        - A `SynclineError` gets a new text, which begins with the call. If a rank is lost, a `TransportError` becomes a
          `RankLostError`.
        - All other errors, such as Ctrl-C or a bug, are not changed.
        """
        # Transports raise Python's own TimeoutError, because they know neither the call nor the group.
        if isinstance(error, TimeoutError):
            return self._timed_out(error, call, timeout_s)
        if isinstance(error, SynclineError):
            explained = self._with_lost_ranks(error)
            failure = explained.reworded(f"{call} on {self._place}: {explained}")
            # Leave `error` itself out of the chain, because the new text contains its whole text.
            failure.__cause__ = error.__cause__
            return failure
        # Ctrl-C and bugs keep their type and text, so that the program can catch them.
        return error

    def not_started(self, what: Call | Signature, first_failure: BaseException) -> TransportError:
        """Return the error for a call after the group has failed."""
        error = TransportError(
            with_details(
                f"{what} on {self._place} was not started because the group had failed before:", in_words(first_failure)
            )
        )
        error.__cause__ = first_failure
        return error

    def closed(self, signature: Signature) -> GroupClosedError:
        """Return the error for a call after the group was closed."""
        return GroupClosedError(
            f"{signature.name} on {self._place}: the group is closed; create it again with init_process_group or new_group"
        )

    def replaced(self, signature: Signature) -> GroupClosedError:
        """Return the error for a call on a group after `shrink` or `admit` has made a newer group."""
        return GroupClosedError(
            f"{signature.name} on {self._place}: there is a newer group already; use the one that shrink or admit returned "
            "(with Elastic: model.join_process_group)"
        )

    def aborted(self) -> TransportError:
        """Return the error of all calls that wait when the group is aborted."""
        return TransportError(f"the group was aborted on {self._place}")

    def ended(self, first_failure: BaseException | None) -> TransportError:
        """Return the error of a send or receive in flight when its group ends.

        `first_failure` is None if the group was closed without a failure.
        """
        error = TransportError(
            with_details(
                "the group has ended before this transfer was over, so the wait for it ends, too:",
                "the group was closed; wait for all transfers first" if first_failure is None else in_words(first_failure),
            )
        )
        error.__cause__ = first_failure
        return error

    def missing(self, call: Call | None) -> str:
        """Return a sentence that names the unfinished call, and the lost and stopped ranks.

        `call` is None if the group has no running call any more.
        """
        liveness = self._liveness
        ranks = () if liveness is None else (*liveness.lost(), *liveness.stopped())
        who = "it is not known which rank it waits for" if not ranks else f"it waits for {self._named(ranks)}"
        return f"{call or 'a collective'} on {self._place} did not end: {who}"

    def _timed_out(self, error: TimeoutError, call: Call, timeout_s: float) -> CollectiveTimeout:
        stopped = () if self._liveness is None else self._liveness.stopped()
        what = f"{call} on {self._place}, did not finish within {timeout_s:g} s"
        # A longer time limit does not help if a rank is stopped, so leave the usual advice out.
        if stopped:
            why = f"{self._named(stopped)} stands still, stopped by a signal; let it go on (SIGCONT)"
            text = with_details(f"{what}: {why}", str(error))
        else:
            text = with_details(
                f"{what}; look for a rank that died, left early, or issued other collectives",
                str(error),
                "If the ranks only need longer, pass a longer timeout to init_process_group.",
            )
        timeout = CollectiveTimeout(text)
        timeout.__cause__ = error.__cause__
        return timeout

    def _with_lost_ranks(self, error: SynclineError) -> SynclineError:
        # Misuse and disagreement are errors of the program, which no lost rank explains.
        if self._liveness is None or not isinstance(error, TransportError) or isinstance(error, RankLostError):
            return error
        lost = self._liveness.loss_behind(error)
        # A broken connection is only a symptom; the user must look at the rank that ended.
        if lost is not None:
            lost.__cause__ = error.__cause__
            return lost
        stopped = self._liveness.stopped()
        if not stopped:
            return error
        return error.reworded(with_details(str(error), f"{self._named(stopped)} stands still, stopped by a signal."))

    def _named(self, ranks: Sequence[int]) -> str:
        return f"rank(s) {list(ranks)}" if self._liveness is None else self._liveness.in_words(ranks)
