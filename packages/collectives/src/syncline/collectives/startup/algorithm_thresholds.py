"""The sizes that decide which algorithm a collective uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from ..errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class AlgorithmThresholds:
    """Sizes in bytes. A size that is never reached (such as 2**62) switches an algorithm off.

    Attributes:
        eager_bytes: the largest size for the eager algorithm, in bytes that a rank reads from its peers. A larger value means
            fewer waits per call, but each rank reads and reduces everything, and the group needs more shared memory.
        window_bytes: the smallest memory that `allocate` puts in a window, and the smallest tensor for which the ranks compare
            whether it is in one. A smaller value means that more tensors are reduced in place, but each takes whole pages.
        staged_bytes: the smallest reduction of plain memory that is copied into shared memory and out again. A smaller value
            means fewer reductions by MPI. But each reduction through shared memory copies its tensor twice, and waits
            for the other ranks at least twice.
        ring_bytes: use our own ring between nodes if a part (the tensor's size divided by the number of nodes) has at least
            this size. A smaller value means that more reductions use the whole bandwidth of a TCP network, but a ring takes as
            many steps as there are nodes. Switch the ring off if the network itself reduces, or the MPI library is tuned for
            it.
    """

    eager_bytes: int = 512 << 10
    window_bytes: int = 128 << 10
    staged_bytes: int = 32 << 10
    ring_bytes: int = 128 << 10

    def overridden(self, environ: Mapping[str, str] = os.environ) -> AlgorithmThresholds:
        """These sizes, replaced by environment variables that are set: SYNCLINE_ and an attribute's name in capitals.

        Raises:
            InvalidArgumentError: a variable is not a positive integer.
        """
        given = {field.name: environ.get(f"SYNCLINE_{field.name.upper()}") for field in fields(self)}
        sizes = {name: _bytes_in(name, text) if text else getattr(self, name) for name, text in given.items()}
        return AlgorithmThresholds(**sizes)


def _bytes_in(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise InvalidArgumentError(f"SYNCLINE_{name.upper()}: expected a positive number of bytes, found {text!r}")
    return int(text)
