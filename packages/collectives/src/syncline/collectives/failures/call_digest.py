"""CallDigest: all calls of a group in their order, as one integer and a count."""

from __future__ import annotations

# A polynomial in a fixed base modulo a Mersenne prime: one multiplication, one addition and one remainder of small integers.
_BASE = 0x9E3779B1
_PRIME = (1 << 61) - 1


class CallDigest:
    """Equal on two ranks if both added the same digests in the same order, and hardly ever otherwise.

    It is the calls as digits of a number in base `_BASE`, modulo a prime of 61 bits, as Rabin and Karp compare strings. Two
    sequences of one length that differ in one call never agree; others agree with a chance of about 2**-61.

    Attributes:
        value: 0 or above, below 2**61.
        count: how many were added.
    """

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value = 0
        self.count = 0

    def add(self, call: int) -> None:
        """Add the digest of the next call."""
        self.count += 1
        self.value = (self.value * _BASE + call + 1) % _PRIME
