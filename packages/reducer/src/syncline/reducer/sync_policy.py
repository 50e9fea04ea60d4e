"""Whether the next backward is reduced: forwards decide it. Pure."""

from __future__ import annotations


class GradSyncPolicy:
    """What the forwards so far say of the next backward.

    A backward is reduced if, since the last reduction, any forward was prepared for it; and, if there was no forward since
    then (a second backward through one graph, say), as the latest forward says. So gradients that a forward outside of
    `no_sync` announced are reduced wherever its backward runs, and those of a forward inside are not.

    Attributes:
        is_due: whether the next backward is reduced.
    """

    def __init__(self) -> None:
        self._pending, self._latest = False, True
        self._before = (False, True)
        self.is_due = True

    def forward(self, reduces: bool) -> None:
        """Note a forward: shall its backward be reduced?"""
        self._before = (self._pending, self._latest)
        self._set(self._pending or reduces, reduces)

    def cancel_forward(self) -> None:
        """The latest forward raised an error: it does not count."""
        self._set(*self._before)

    def reduced(self) -> None:
        """A reduction has ended."""
        self._set(False, self._latest)

    def _set(self, pending: bool, latest: bool) -> None:
        self._pending, self._latest = pending, latest
        self.is_due = pending or latest
