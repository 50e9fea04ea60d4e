"""Buckets that wait until users' hooks on their latest gradient have run."""

from __future__ import annotations

import threading

from .gradient_hooks import PendingGradients
from .torch_internals import current_backward


class AwaitingHooks:
    """Which buckets are worth a look, and where users' hooks on the latest gradient of each run.

    See Note [After all users' hooks]. These hooks have run when the node of that gradient's parameter is done, or when the same
    backward on the same thread has come to another gradient.
    """

    def __init__(self) -> None:
        self._where: dict[PendingGradients, tuple[int, int]] = {}

    def add(self, pending: PendingGradients) -> None:
        """Called inside the hook on the latest gradient of a bucket that is worth a look."""
        self._where[pending] = _here()

    def node_done(self, pending: PendingGradients, index: int) -> bool:
        """All hooks on this parameter have run: whether its bucket waited for just that. It does no longer."""
        if pending not in self._where or pending.indices[-1] != index:
            return False
        del self._where[pending]
        return True

    def pop_done(self) -> list[PendingGradients]:
        """Called inside a hook: the buckets that waited for an earlier gradient of this thread and backward."""
        if not self._where:
            return []
        here = _here()
        done = [pending for pending, where in self._where.items() if where == here]
        for pending in done:
            del self._where[pending]
        return done

    def clear(self) -> None:
        """Nothing waits: the backward has ended."""
        self._where.clear()


def _here() -> tuple[int, int]:
    """This thread and the backward that runs on it."""
    return threading.get_ident(), current_backward()
