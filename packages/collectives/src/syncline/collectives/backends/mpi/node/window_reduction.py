"""All-reducing a tensor in a window: planned beforehand, for one place."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import memmove
from typing import NamedTuple

import torch

from ....contract.reduce_op import Reduction
from ....host.reduction import always_of
from .kept import view_at
from .slicing import chunks, slice_of
from .windows import Place

# What is reduced before it is handed out, of all ranks together: much of the result is then still in the cache. Measured with
# caches of 2 MiB for each core, two ranks, in turn on the same memory in huge pages, microseconds:
#
#            256 KiB   512 KiB   1 MiB   2 MiB   4 MiB
#    4 MiB       258       243     243     277     318
#   25 MiB     3,959     3,873   4,170   4,445   4,900
#   64 MiB     8,173     8,415   8,630   8,810  10,526
CHUNK_BYTES = 512 << 10
# But of each rank as much as is worth a call (8 and 16 ranks, 8 MiB: 1.1 and 1.2 times faster than by the rule above).
LEAST_CHUNK_BYTES = 128 << 10


class _Chunk(NamedTuple):
    """What is reduced at a time.

    Attributes:
        reduce: combines everybody's terms, into `out`.
        out: this rank's.
        source: where that is.
        targets: where the other ranks want it.
        nbytes: its size.
    """

    reduce: Callable[..., object]
    out: torch.Tensor
    source: int
    targets: list[int]
    nbytes: int


class WindowAllReduce:
    """One rank's part of an `all_reduce` in a window; see Note [Slices] in `in_window`. It keeps no window alive.

    Args:
        place: of the tensor.
        numel: of the tensor.
        dtype: of the tensor.
        op: the reduction.
    """

    def __init__(self, place: Place, numel: int, dtype: torch.dtype, op: Reduction) -> None:
        segment = place.segment
        first = segment.address() - segment.offset_of(segment.mine) + place.offset_bytes
        start, stop = slice_of(numel, segment.parts, segment.mine)
        addresses = [first + segment.offset_of(part) + start * dtype.itemsize for part in range(segment.parts)]
        slices = [view_at(address, stop - start, dtype) for address in addresses if stop > start]
        source = addresses.pop(segment.mine)
        step = max(1, max(CHUNK_BYTES // segment.parts, LEAST_CHUNK_BYTES) // dtype.itemsize)
        self._chunks = []
        for begin, end in chunks(0, stop - start, step):
            terms = [everybodys[begin:end] for everybodys in slices]
            reduce = always_of(terms, op, dtype)
            done, nbytes = begin * dtype.itemsize, (end - begin) * dtype.itemsize
            targets = [address + done for address in addresses]
            self._chunks.append(_Chunk(reduce, terms[segment.mine], source + done, targets, nbytes))

    def __len__(self) -> int:
        return len(self._chunks)

    def run(self) -> None:
        """Reduce this rank's slice for everybody. All ranks have met; a barrier must follow."""
        for reduce, out, source, targets, nbytes in self._chunks:
            reduce(out=out)
            for target in targets:
                memmove(target, source, nbytes)
