"""Run the ranks of a test as threads of this process."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ..engine.cancel_scope import CancelScope
from ..group import ProcessGroup
from ..transports.threads import create_groups

T = TypeVar("T")

# After one rank has failed and the group was aborted, the other ranks have this long to end.
_GRACE_S = 5.0


def run_ranks(world_size: int, body: Callable[..., T], *args: Any, timeout_s: float = 60.0) -> list[T]:
    """Test a function on several ranks in one process: run `body(group, *args)` on every rank of a new group.

    Each rank has its own thread. When one rank raises an error, the group is aborted, so that the other ranks end, too. Then
    `run_ranks` raises this first error, with a note that names the rank. If a collective that nobody waited for fails,
    `run_ranks` raises the collective's error.

    Args:
        world_size: the number of ranks.
        body: called with the rank's group, then `args`. All ranks share the process, so give each rank its own tensors and
            models.
        args: more arguments of `body`; every rank gets the same objects.
        timeout_s: the time limit of the whole run, in seconds. Each collective has nine tenths of this time.

    Returns:
        The results of `body`, in the order of the ranks.

    Raises:
        TimeoutError: a rank did not return in time. The message shows this rank's stack. The rank's thread goes on.
    """
    groups = create_groups(world_size, name="ranks", timeout_s=0.9 * timeout_s)
    ranks = _Ranks([_Rank(group, body, args) for group in groups])
    ranks.run(timeout_s)
    ranks.close()
    return [rank.result for rank in ranks.members]


class _Rank(Generic[T]):
    result: T

    def __init__(self, group: ProcessGroup, body: Callable[..., T], args: Sequence[Any]) -> None:
        self.group = group
        self.name = f"rank {group.rank} of {group.size}"
        self._body = body
        self._args = args
        # Use a daemon thread, so that the interpreter can end even if a rank hangs.
        self.thread = threading.Thread(target=self._run, name=f"{self.name} (run_ranks)", daemon=True)
        self.on_end: Callable[[_Rank[T], BaseException | None], None] | None = None

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self.result = self._body(self.group, *self._args)
        except BaseException as raised:  # noqa: BLE001 - also pytest's skip and SystemExit, for the caller
            error = raised
        assert self.on_end is not None
        self.on_end(self, error)

    def stack(self) -> str:
        frame = sys._current_frames().get(self.thread.ident or 0)
        where = "".join(traceback.format_stack(frame)) if frame is not None else "  (it has just ended)\n"
        return f"{self.name} is at:\n{where}"


class _Ranks(Generic[T]):
    def __init__(self, members: list[_Rank[T]]) -> None:
        self.members = members
        self._condition = threading.Condition()
        self._running = set(members)
        self._first_failure: tuple[_Rank[T], BaseException] | None = None

    def run(self, timeout_s: float) -> None:
        for rank in self.members:
            rank.on_end = self._on_end
            rank.thread.start()
        with self._condition:
            self._condition.wait_for(lambda: not self._running or self._first_failure is not None, timeout_s)
        if self._running:
            self._end_the_others(timeout_s)
        if self._first_failure is not None:
            raise self._annotated(*self._first_failure)

    def close(self) -> None:
        """Close all groups. If a call failed that nobody has waited for, raise the call's error."""
        for rank in self.members:
            try:
                rank.group.close()
            except BaseException as error:  # noqa: BLE001 - raised again
                raise self._annotated(rank, error) from error.__cause__

    def _on_end(self, rank: _Rank[T], error: BaseException | None) -> None:
        with self._condition:
            self._running.discard(rank)
            if error is not None and self._first_failure is None:
                self._first_failure = rank, error
            self._condition.notify_all()

    def _end_the_others(self, timeout_s: float) -> None:
        with self._condition:
            late = sorted(self._running, key=lambda rank: rank.group.rank) if self._first_failure is None else []
        stacks = "".join(rank.stack() for rank in late)
        for rank in self.members:
            rank.group.abort()
        if late:
            raise TimeoutError(f"{_names(late)} did not return within {timeout_s:g} s\n{stacks}")
        with self._condition:
            self._condition.wait_for(lambda: not self._running, CancelScope(_GRACE_S).remaining_s())

    def _annotated(self, rank: _Rank[T], error: BaseException) -> BaseException:
        for group in (member.group for member in self.members):
            group.abort()
        note = f"raised by {rank.name} (run_ranks)"
        with self._condition:
            hung = sorted(self._running, key=lambda other: other.group.rank)
        if hung:
            stacks = "".join(other.stack() for other in hung)
            note += f"; {_names(hung)} did not end within {_GRACE_S:g} s after it\n{stacks}"
        return _with_note(error, note)


def _names(ranks: Sequence[_Rank[T]]) -> str:
    return ", ".join(rank.name for rank in ranks)


def _with_note(error: BaseException, note: str) -> BaseException:
    if sys.version_info >= (3, 11):
        error.add_note(note)
        return error
    # Python 3.10 has no notes. Put the note at the end of the chain of causes.
    innermost: BaseException = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    innermost.__cause__ = RuntimeError(note)
    return error
