"""From which size on which way of a collective is taken."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from ..errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class Crossovers:
    """Sizes in bytes; a size that is never reached (such as 2**62) switches a way off.

    Attributes:
        exchange_bytes: up to here, ranks of one node show each other what they have, and each does with it what it needs;
            counted is what each reads of the others.
        exchange_bytes_fast_mpi: the same for reductions that Open MPI or Intel MPI do themselves, which are faster.
        window_bytes: from here on, memory that a group allocates lies in a window that the ranks of a node share, and
            collectives on such memory run there.
        single_copy_bytes: from here on, counted for each rank, ranks of one node read one another's memory to reduce it, where
            the system allows that.
        single_copy_bytes_fast_mpi: the same for reductions that Open MPI or Intel MPI do themselves.
        staged_bytes: from here on, reductions of memory that is not read go through a window of the group.
        staged_bytes_not_native: the same for reductions that the library underneath does not do: those of float16 and bfloat16,
            for example, and every `reduce_scatter`. Their `all_reduce` on several nodes, too.
    """

    exchange_bytes: int = 512 << 10
    exchange_bytes_fast_mpi: int = 64 << 10
    window_bytes: int = 128 << 10
    single_copy_bytes: int = 256 << 10
    single_copy_bytes_fast_mpi: int = 2 << 20
    staged_bytes: int = 48 << 20
    staged_bytes_not_native: int = 64 << 10

    def overridden(self, environ: Mapping[str, str] = os.environ) -> Crossovers:
        """As set by environment variables, where there are any: SYNCLINE_ and an attribute's name in capitals.

        Raises:
            InvalidArgumentError: one is no positive integer.
        """
        given = {field.name: environ.get(f"SYNCLINE_{field.name.upper()}") for field in fields(self)}
        return Crossovers(**{name: getattr(self, name) if not text else _bytes_in(name, text) for name, text in given.items()})


def _bytes_in(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise InvalidArgumentError(f"SYNCLINE_{name.upper()}: expected a positive number of bytes, found {text!r}")
    return int(text)
