"""Whether the next backward is reduced: forwards decide it. Pure."""

from __future__ import annotations


class GradSyncPolicy:
    """What the forwards so far say of the next backward.

    The policy does not know which forward a backward belongs to. The first backward after a forward outside of `no_sync` is
    reduced, wherever it runs; without a forward since the last reduction (a second backward through one graph, say), the
    latest forward decides. So after a forward outside and one inside, the backward that comes first is reduced, with all
    that was accumulated, and the other one adds to this rank's gradients only, until a later one is reduced. As in torch.

    Attributes:
        is_due: whether the next backward is reduced.
    """

    def __init__(self) -> None:
        self._announced, self._latest = False, True
        self._before = (False, True)
        self.is_due = True

    def forward(self, reduces: bool) -> None:
        """Note a forward: shall its backward be reduced?"""
        self._before = (self._announced, self._latest)
        self._set(self._announced or reduces, reduces)

    def cancel_forward(self) -> None:
        """The latest forward raised an error: it does not count."""
        self._set(*self._before)

    def reduced(self) -> None:
        """A reduction has ended."""
        self._set(False, self._latest)

    def _set(self, announced: bool, latest: bool) -> None:
        self._announced, self._latest = announced, latest
        self.is_due = announced or latest
