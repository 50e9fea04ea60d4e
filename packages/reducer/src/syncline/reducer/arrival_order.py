"""The order in which gradients arrive."""

from __future__ import annotations

from collections.abc import Sequence


class ArrivalOrder:
    """The indices of the parameters, ordered by the time of each parameter's last gradient.

    Attributes:
        learned: the order. None before the order is known.
        is_used: whether the buckets are in this order.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._arrivals: list[int] = []
        self.learned: Sequence[int] | None = None
        self.is_used = False

    def arrived(self, index: int) -> None:
        """Record a gradient of the running backward. A parameter may get several gradients."""
        self._arrivals.append(index)

    def learn(self) -> None:
        """Set `learned` to the order of the gradients in the ended backward. Parameters without a gradient come last."""
        # A parameter may get several gradients. Only its last gradient makes the parameter ready.
        latest = dict.fromkeys(reversed(self._arrivals))
        came = list(reversed(latest))
        self.learned = [*came, *(index for index in range(self._count) if index not in latest)]

    def forget_arrivals(self) -> None:
        """Forget the recorded gradients, because the next gradient belongs to another backward."""
        self._arrivals.clear()
