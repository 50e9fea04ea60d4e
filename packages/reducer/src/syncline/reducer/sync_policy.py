"""Whether the next backward is reduced, and what the ranks compare about it. Forwards decide both. Pure."""

from __future__ import annotations


class GradSyncPolicy:
    """What the forwards so far say about the next backward.

    Note [Which backward is reduced]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    The policy does not know which forward a backward belongs to. The first backward after a forward outside of `no_sync` is
    reduced, wherever it runs. So after a forward outside and one inside, the backward that comes first is reduced, with all
    accumulated gradients. A backward without a forward (a second one through one graph, one of the bare module) is reduced,
    too, unless the latest forward was within `no_sync`, or the backward itself is. Every other backward adds to this rank's
    gradients, until a later one is reduced.

    Ranks pair their reduced backwards by count. If one rank alone runs a backward of the bare module, all its later ones pair
    with the wrong ones of the other ranks. So the ranks compare, with the first bucket, the forward of a backward, and the
    number of this backward since the forward (`mark`). A forward is counted when its backward is reduced. So a forward without
    a backward, or several before one, are no mistake, and may happen on some ranks only. One case stays unnoticed: stray
    backwards in a loop that never calls the wrapper's forward. There nothing distinguishes one backward from another.

    Attributes:
        is_due: whether the next backward is reduced.
    """

    def __init__(self) -> None:
        self._announced, self._latest = False, True
        self._before = (False, True)
        self._is_local = False
        self._forwards = self._backwards = 0
        self.is_due = True

    def forward(self, reduces: bool) -> None:
        """Note a forward: shall its backward be reduced?"""
        self._before = (self._announced, self._latest)
        self._set(self._announced or reduces, reduces)

    def cancel_forward(self) -> None:
        """The latest forward raised an error, so it does not count."""
        self._set(*self._before)

    def reduced(self) -> None:
        """A reduced backward has ended."""
        self._forwards, self._backwards = self._next()
        self._set(False, self._latest)

    def keep_local(self, is_local: bool) -> None:
        """Set whether backwards run within `no_sync` from now on."""
        self._is_local = is_local
        self._set(self._announced, self._latest)

    @property
    def has_forward(self) -> bool:
        """Whether a forward waits for its backward, which is to be reduced."""
        return self._announced

    @property
    def mark(self) -> str:
        """The text about the next reduced backward that the ranks compare."""
        forward, backward = self._next()
        return f"backward {backward} since forward {forward}"

    def _next(self) -> tuple[int, int]:
        return (self._forwards + 1, 1) if self._announced else (self._forwards, self._backwards + 1)

    def _set(self, announced: bool, latest: bool) -> None:
        self._announced, self._latest = announced, latest
        self.is_due = announced or (latest and not self._is_local)
