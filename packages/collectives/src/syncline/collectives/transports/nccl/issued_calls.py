"""IssuedCalls: the record of a group's calls, and whether the other ranks made the same."""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from ...engine.cancel_scope import CancelScope
from ...errors import DisagreementError, SynclineError, TransportError
from ...health.agreement import Agreement
from ...health.recorder import Entry, Recorder
from ...health.statements import Statements
from .connector import Connector
from .failure import Failure
from .rendezvous import Payload

logger = logging.getLogger("syncline.collectives")

# How long a rank that closes a group waits for the others, to compare what they have called. Short, for nothing says that
# a rank has failed, and will not come.
_CLOSE_S = 5.0
# Up to so many ranks verify after each backward; of more, one rank would receive too many messages in one step.
_VERIFIED_EACH_TIME = 16
# A thread inside a store when the interpreter is taken down would crash the process; `Progress` waits for it until then.
_exiting = threading.Event()
atexit.register(_exiting.set)


class RendezvousMessages:
    """A `Carrier` by the messages by which the ranks also find one another; see `Rendezvous.agree`.

    Cost: two messages for each rank but the first, which sends and receives them all.
    """

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._numbers = itertools.count()

    def maximum(self, numbers: Sequence[int], scope: CancelScope) -> list[int]:
        """As `Carrier`; a rank that does not come is a `TransportError`."""
        decision = self._agree({"numbers": list(numbers)}, _largest, scope)
        return list(decision["numbers"])

    def statements(self, text: str, scope: CancelScope) -> Statements:
        """The same."""
        said = Statements()
        said.add_packed(self._agree({"text": text}, _together, scope)["packed"])
        return said

    def _agree(self, mine: Payload, decide: Callable[[list[Payload]], Payload], scope: CancelScope) -> Payload:
        return self._connector.agree(f"comparison {next(self._numbers)}", mine, decide, scope)


def _largest(said: list[Payload]) -> Payload:
    return {"numbers": [max(column) for column in zip(*(entry["numbers"] for entry in said), strict=True)]}


def _together(said: list[Payload]) -> Payload:
    return {"packed": Statements.of([entry["text"] for entry in said]).packed()}


class PendingVerification:
    """One verification by all ranks, which runs on a thread.

    Attributes:
        calls: what is compared.
        error: why it could not be made, if it could not; a difference ends the group instead.
        is_over: it was made, or could not be.
    """

    def __init__(self, calls: CallsSoFar) -> None:
        self.calls = calls
        self.error: SynclineError | None = None
        self.is_over = threading.Event()


class IssuedCalls:
    """Records what is issued on this rank, and verifies it with the other ranks.

    Note [Verification over NCCL]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    NCCL does not compare calls: ranks that disagree get wrong sums, or wait for ever. So the ranks verify them as Note
    [Verification of calls] in `host.history_verification` says, by messages on the host, which the GPU takes no part in. They
    are exchanged on a thread of the group, one verification after the other. A step does not wait for them: what is found ends
    the group, and whoever asks it for something next gets the error. A barrier that is waited for, and `close`, wait for the
    verification, too, `close` for `_CLOSE_S` seconds at most. Among more than `_VERIFIED_EACH_TIME` ranks, only one backward in
    so many is verified.

    Calls are recorded and digested in the order in which they are put on the stream. A CUDA graph is recorded when it is
    captured; its replays are not.

    Args:
        connector: lets the ranks talk on the host.
        recorder: of the group.
        timeout_s: how long a verification may take; asked for each.
        failure: what has ended the group, or None.
        fail: ends it.
    """

    def __init__(
        self,
        connector: Connector,
        recorder: Recorder,
        timeout_s: Callable[[], float],
        failure: Callable[[], Failure | None],
        fail: Callable[[BaseException], object],
    ) -> None:
        self.recorder = recorder
        self._timeout_s = timeout_s
        self._failure = failure
        self._fail = fail
        self._is_closing = False
        self._requests = 0
        self._every = -(-len(connector.ranks) // _VERIFIED_EACH_TIME)
        is_alone = len(connector.ranks) == 1
        self._verification = None if is_alone else Agreement(RendezvousMessages(connector), connector.rank, recorder)
        self._progress = Progress(f"syncline-nccl-calls-{connector.name}-rank{connector.rank}")

    def begin(self, call: Collective, entry: Entry) -> None:
        """A call is put on the stream: it has its place in the order from now on. Under the lock of the group's issues."""
        self.recorder.begin(entry)
        verification = self._verification
        if verification is not None and entry[0] is not None:
            verification.add(call.digest())
            if verification.is_due:
                self.verify()

    def verify_now_and_then(self) -> None:
        """Verify, unless the group has so many ranks that this time is left out. All ranks call it equally often."""
        self._requests += 1
        if self._requests % self._every == 0:
            self.verify()

    def verify(self) -> PendingVerification | None:
        """Verify the calls until now, on a thread; None if there is no other rank."""
        verification = self._verification
        if verification is None:
            return None
        pending = PendingVerification(verification.so_far())
        if not self._progress.enqueue(partial(self._run, verification, pending, self._timeout_s())):
            pending.is_over.set()  # the group has been closed
        return pending

    def close(self) -> None:
        """Verify a last time, and wait for it.

        Raises:
            BaseException: what ended the group, if that is a difference that was found.
        """
        self._is_closing = True
        if self._failure() is None and self._verification is not None and self._verification.so_far().calls:
            pending = self.verify()
            assert pending is not None
            pending.is_over.wait()
        self._progress.stop()

    def stop(self) -> None:
        """No more verifications."""
        self._progress.stop()

    def _run(self, verification: Agreement, pending: PendingVerification, timeout_s: float) -> None:
        try:
            if self._failure() is None:
                limit_s = min(timeout_s, _CLOSE_S) if self._is_closing else timeout_s
                verification.verify(CancelScope(limit_s, self._reason_to_give_up), pending.calls)
        except DisagreementError as error:
            self._fail(error)
        except SynclineError as error:
            # The rank that did not come has not issued what this one has, or has ended without a word. If a collective waits
            # for it, that will time out.
            pending.error = error
            logger.info("group '%s': calls were not compared: %s", self.recorder.group_name, error)
        except BaseException as error:  # noqa: BLE001 - it would be lost on this thread
            self._fail(error)
        finally:
            pending.is_over.set()

    def _reason_to_give_up(self) -> TransportError | None:
        if _exiting.is_set():
            return TransportError("the process ends")
        return None if self._failure() is None else TransportError("the group has failed meanwhile")
