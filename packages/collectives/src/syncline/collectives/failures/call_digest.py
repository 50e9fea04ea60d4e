"""CallDigest: all calls of a group in their order, as one integer and a count."""

from __future__ import annotations

# An odd multiplier with well mixed bits (the golden ratio's), and results that fit the 64 signed bits that ranks exchange.
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 62) - 1


class CallDigest:
    """Equal on two ranks, but for one chance in 2**62, if and only if both added the same digests in the same order.

    Attributes:
        value: 0 or above, below 2**62.
        count: how many were added.
    """

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value = 0
        self.count = 0

    def add(self, call: int) -> None:
        """Add the digest of the next call."""
        self.count += 1
        mixed = ((self.value ^ call) + self.count) * _MULTIPLIER
        self.value = (mixed ^ (mixed >> 31)) & _MASK
