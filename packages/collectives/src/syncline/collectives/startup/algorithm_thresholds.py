"""From which size on which algorithm of a collective is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from ..errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class AlgorithmThresholds:
    """Sizes in bytes; a size that is never reached (such as 2**62) switches an algorithm off.

    Attributes:
        eager_bytes: the largest size for the eager algorithm, in bytes that a rank reads from its peers. Larger: fewer waits
            per call, but each rank reads and reduces everything, and the group needs more shared memory.
        window_bytes: the smallest memory of `allocate` that lies in a window, and the smallest tensor for which the ranks
            compare whether it does. Smaller: more tensors are reduced in place, at the price of whole pages for each.
        staged_bytes: the smallest reduction of plain memory that is copied into shared memory and out again. Smaller: fewer
            reductions are left to MPI; each copies its tensor twice and waits for the other ranks at least twice.
        ring_bytes: the smallest part of a tensor, its size divided by the number of nodes, from which nodes reduce it in a
            ring of our own. Smaller: more reductions use the whole bandwidth of a TCP network, but a ring takes as many steps
            as there are nodes. Never: where the network reduces by itself, or the MPI library is tuned for it.
    """

    eager_bytes: int = 512 << 10
    window_bytes: int = 128 << 10
    staged_bytes: int = 32 << 10
    ring_bytes: int = 128 << 10

    def overridden(self, environ: Mapping[str, str] = os.environ) -> AlgorithmThresholds:
        """As set by environment variables, where there are any: SYNCLINE_ and an attribute's name in capitals.

        Raises:
            InvalidArgumentError: one is no positive integer.
        """
        given = {field.name: environ.get(f"SYNCLINE_{field.name.upper()}") for field in fields(self)}
        sizes = {name: _bytes_in(name, text) if text else getattr(self, name) for name, text in given.items()}
        return AlgorithmThresholds(**sizes)


def _bytes_in(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise InvalidArgumentError(f"SYNCLINE_{name.upper()}: expected a positive number of bytes, found {text!r}")
    return int(text)
