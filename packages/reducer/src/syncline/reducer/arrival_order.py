"""The order in which gradients arrive, learnt in one backward, so that buckets can be built in it. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class ArrivalOrder:
    """The parameters, by index, in the order in which the last gradient of each came.

    Args:
        count: how many parameters there are.

    Attributes:
        learned: the order; None until a backward has ended in which it was watched.
        is_used: whether the buckets are in this order.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._arrivals: list[int] = []
        self.learned: Sequence[int] | None = None
        self.is_used = False

    def arrived(self, index: int) -> None:
        """Note a gradient of the running backward; a parameter may get several."""
        self._arrivals.append(index)

    def learn(self) -> None:
        """The backward has ended: take its order. Parameters without a gradient stand at the end."""
        latest = dict.fromkeys(reversed(self._arrivals))
        came = list(reversed(latest))
        self.learned = [*came, *(index for index in range(self._count) if index not in latest)]

    def forget_arrivals(self) -> None:
        """The next gradient belongs to another backward."""
        self._arrivals.clear()
