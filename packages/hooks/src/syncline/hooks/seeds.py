"""Seeds that are the same on all ranks."""

from __future__ import annotations

import operator
import random
from typing import SupportsIndex

import torch

from syncline.collectives import InvalidArgumentError

_WORDS = 624
_LIMIT = 1_000_000_000


def check_seed(name: str, seed: int) -> None:
    """Check that a seed is an integer (also one of NumPy) in 0 to 2**32 - 1. An error's text contains `name`.

    Raises:
        InvalidArgumentError: the seed is out of range, or not an integer.
    """
    if not isinstance(seed, SupportsIndex):
        raise InvalidArgumentError(f"expected an integer as {name}, found {type(seed).__name__}")
    if not 0 <= seed < 2**32:
        raise InvalidArgumentError(f"expected a {name} from 0 to 2**32 - 1, found {seed}")


class SharedSeeds:
    """Draws the numbers of `numpy.random.RandomState(seed).randint(1_000_000_000)`, which torch's PowerSGD uses as seeds.

    Source of the generator: the Mersenne Twister (Matsumoto and Nishimura, 1998). The seed is 0 to 2**32 - 1, the same on every
    rank.
    """

    def __init__(self, seed: int) -> None:
        # Python and numpy use the same generator, but seed it in different ways. So compute the first state as numpy does.
        words = [operator.index(seed)]  # an integer of NumPy would overflow below
        for number in range(1, _WORDS):
            words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + number) & 0xFFFFFFFF)
        self._random = random.Random()
        self._random.setstate((3, (*words, _WORDS), None))

    def next(self) -> int:
        """Return the next seed, 0 to 999,999,999."""
        while True:
            # Like numpy, draw 30 bits, and draw again if the number is too large.
            value = self._random.getrandbits(32) & 0x3FFFFFFF
            if value < _LIMIT:
                return value

    def state(self) -> torch.Tensor:
        """Return the generator's state: 625 int64 numbers."""
        return torch.tensor(self._random.getstate()[1], dtype=torch.int64, device="cpu")

    def restore(self, state: torch.Tensor) -> None:
        """Continue from a result of `state`."""
        self._random.setstate((3, tuple(state.tolist()), None))
