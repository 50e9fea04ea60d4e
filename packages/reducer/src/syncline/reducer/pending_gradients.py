"""A state machine, without tensors, for gradients that have come and that the reducer has not yet put into buckets."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TypeAlias

EVERY_GRADIENT: Container[int] = range(1, 1 << 62)

#: A thread, and the number of the backward that runs on it.
Where: TypeAlias = tuple[int, int]


class PendingBucket:
    """The gradients of one bucket that have come and that the reducer has not taken yet.

    Note [What one gradient costs]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Autograd calls a Python hook for every gradient. The call takes about a microsecond, the largest cost of a reducer in
    Python. So the hook only appends an index to a list. The hook wakes the reducer only at a bucket's first gradient, where a
    backward may begin, and when the bucket may be complete. The list needs no lock: all parameters of a bucket are on one
    device, and autograd has one thread for each device.

    Attributes:
        members: the parameters' indices, in the order in which their gradients are expected.
        indices: the parameter's index for each gradient that has come and was not taken, in the order of the gradients.
        wake_at: the hook wakes the reducer when the length of `indices` is in this container.
    """

    __slots__ = ("_needed", "indices", "members", "wake_at")

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        self.indices: list[int] = []
        self.expect(None)

    def expect(self, needed: int | None, *, watch_all: bool = False) -> None:
        """Set how many gradients must come before the reducer takes them. If `needed` is None, one gradient is enough.

        The first gradient and gradient number `needed` wake the reducer. With `watch_all`, or if `needed` is None, every
        gradient wakes the reducer.
        """
        self._needed = needed or 1
        self.wake_at: Container[int] = EVERY_GRADIENT if watch_all or needed is None else (1, needed)

    @property
    def are_enough(self) -> bool:
        """Whether enough gradients have come for the reducer to take them."""
        return len(self.indices) >= self._needed

    def take(self, *, but_last: bool = False) -> list[int]:
        """Return the indices of the gradients that have come, and forget these gradients.

        With `but_last`, leave out the latest gradient. Until the next call of `expect`, `are_enough` is True after one
        gradient.
        """
        count = len(self.indices) - but_last
        taken = self.indices[:count]
        del self.indices[:count]
        self._needed = 1
        return taken


class PendingGradients:
    """The pending gradients of all buckets of a reducer.

    ::

        counting ──enough have come──► waiting, where users' hooks on the latest gradient run ──they have run──► taken
            ▲                                                                                                      │
            └──────────────────────────── from now on, one gradient is enough ─────────────────────────────────────┘

    Users' hooks on a gradient have run when the autograd node of its parameter has finished, or when the thread of this
    backward has come to another gradient. See Note [After all users' hooks] in `gradient_hooks`.

    `buckets` has the members of each bucket; see `PendingBucket`.
    """

    def __init__(self, buckets: Sequence[Sequence[int]]) -> None:
        self._buckets = [PendingBucket(members) for members in buckets]
        self._waiting: dict[PendingBucket, Where] = {}

    def __iter__(self) -> Iterator[PendingBucket]:
        return iter(self._buckets)

    def came(self, bucket: PendingBucket, here: Where) -> list[tuple[PendingBucket, list[int]]]:
        """Record that a gradient of the bucket has come. `here` is the thread and the backward of this call.

        The hook on this gradient calls this method.

        Returns:
            The buckets that waited for the hooks on an earlier gradient of this thread and backward, each with its taken
            gradients. The new gradient is not taken.
        """
        done = [one for one, where in self._waiting.items() if where == here] if self._waiting else []
        for one in done:
            del self._waiting[one]
        taken = [(one, one.take(but_last=one is bucket)) for one in done]
        # The bucket waits until users' hooks on this gradient have run.
        if bucket.are_enough:
            self._waiting[bucket] = here
        return taken

    def node_done(self, bucket: PendingBucket, index: int) -> list[int]:
        """Record that all hooks on a parameter have run.

        If the bucket waited for these hooks, take and return its gradients. If not, return an empty list.
        """
        # The bucket needs more gradients, or waits for the hooks on another parameter.
        if bucket not in self._waiting or bucket.indices[-1] != index:
            return []
        del self._waiting[bucket]
        return bucket.take()

    def take_all(self) -> list[tuple[PendingBucket, list[int]]]:
        """Take all gradients. Return each bucket that had some, with these gradients."""
        self._waiting.clear()
        return [(bucket, bucket.take()) for bucket in self._buckets if bucket.indices]
