"""Decide whether the next backward is reduced."""

from __future__ import annotations


class GradSyncPolicy:
    """Decides whether the next backward is reduced, from the forwards and backwards so far.

    Note [Which backward is reduced]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    The policy does not know which forward a backward belongs to, so it follows these rules:

    * After a forward outside of `no_sync`, the first backward is reduced, with all accumulated gradients. A forward inside
      `no_sync` in between changes nothing.
    * A backward without a forward (a second backward through one graph, or a backward of the bare module) is also reduced.
      Exceptions: the latest forward was within `no_sync`, or the backward itself runs within `no_sync`.
    * Every other backward adds to this rank's gradients, until a later backward is reduced.

    To detect that a rank runs an additional backward, the ranks compare a text (`mark`) together with the first bucket. The
    text contains the number of the latest forward, and the number of backwards since this forward. In a loop that never calls
    the wrapper's forward, the text cannot show an additional backward.

    A forward counts only when its backward is reduced. So one rank may run a forward without a backward, or several forwards
    before one backward.

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
        """Record a forward. `reduces` says whether the backward of this forward will be reduced."""
        self._before = (self._announced, self._latest)
        self._set(self._announced or reduces, reduces)

    def cancel_forward(self) -> None:
        """Forget the latest forward, because no backward will follow this forward."""
        self._set(*self._before)

    def reduced(self) -> None:
        """Record the end of a backward that averaged gradients."""
        self._forwards, self._backwards = self._next()
        self._set(False, self._latest)

    def keep_local(self, is_local: bool) -> None:
        """Set whether backwards run within `no_sync` from now on."""
        self._is_local = is_local
        self._set(self._announced, self._latest)

    @property
    def has_forward(self) -> bool:
        """Whether a forward ran outside of `no_sync`, and its backward has not ended yet."""
        return self._announced

    @property
    def mark(self) -> str:
        """A text that identifies the next reduced backward, such as "backward 1 since forward 7".

        The ranks compare this text.
        """
        forward, backward = self._next()
        return f"backward {backward} since forward {forward}"

    def _next(self) -> tuple[int, int]:
        return (self._forwards + 1, 1) if self._announced else (self._forwards, self._backwards + 1)

    def _set(self, announced: bool, latest: bool) -> None:
        self._announced, self._latest = announced, latest
        self.is_due = announced or (latest and not self._is_local)
