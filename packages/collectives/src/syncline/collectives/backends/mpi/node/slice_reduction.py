"""Reducing what other processes have, by reading it there: for tensors of one size, planned beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ....contract.reduce_op import Reduction
from ....host.reduction import always_of
from .kept import Kept, view_at
from .peer_memory import PeerMemory
from .slicing import chunks, slice_of

# What is read at a time, of all together: when it is reduced it is still in the core's cache.
CHUNK_BYTES = 1 << 20


class _Chunk(NamedTuple):
    """What is reduced at a time.

    Attributes:
        offset_bytes: where it begins in everybody's tensor.
        nbytes: its size.
        reads: from which rank to which address here.
        reduce: combines what was read with what is here, into `out`.
        out: where the result goes.
    """

    offset_bytes: int
    nbytes: int
    reads: list[tuple[int, int]]
    reduce: Callable[..., object]
    out: torch.Tensor


class SliceReduction:
    """Combines what all ranks have between two indices, chunk by chunk, in rank order.

    Args:
        peers: the memory of all ranks.
        mine: this rank.
        start: the first index.
        stop: the index after the last.
        dtype: of the tensors.
        op: what to do with them.
    """

    def __init__(self, peers: PeerMemory, mine: int, start: int, stop: int, dtype: torch.dtype, op: Reduction) -> None:
        self._peers = peers
        self._mine = mine
        self._start, self._stop = start, stop
        self._dtype = dtype
        self._op = op

    def plan(self, own: torch.Tensor, out: torch.Tensor) -> list[_Chunk]:
        """What `run` does with what this rank has from `start` to `stop`, and where the result goes: flat tensors, or one."""
        itemsize = self._dtype.itemsize
        planned = []
        for begin, end in chunks(0, self._stop - self._start, max(1, CHUNK_BYTES // (len(self._peers) * itemsize))):
            offset_bytes = (self._start + begin) * itemsize
            terms = self._peers.landing(end - begin, self._dtype)
            reads = [(rank, term.data_ptr()) for rank, term in enumerate(terms) if rank != self._mine]
            terms[self._mine] = own[begin:end]
            reduce = always_of(terms, self._op, self._dtype)
            planned.append(_Chunk(offset_bytes, (end - begin) * itemsize, reads, reduce, out[begin:end]))
        return planned

    def run(self, planned: Sequence[_Chunk], addresses: Sequence[int]) -> None:
        """Combine.

        Args:
            planned: of this rank's tensor.
            addresses: where each rank's tensor begins.
        """
        read = self._peers.read
        for offset_bytes, nbytes, reads, reduce, out in planned:
            for rank, landing in reads:
                read(rank, addresses[rank] + offset_bytes, landing, nbytes)
            reduce(out=out)


class SlicedAllReduce:
    """Each rank reduces a slice, and fetches the others' results from where they were made.

    Args:
        peers: the memory of all ranks.
        mine: this rank.
        numel: of the tensors.
        dtype: of the tensors.
        op: what to do with them.
    """

    def __init__(self, peers: PeerMemory, mine: int, numel: int, dtype: torch.dtype, op: Reduction) -> None:
        size, itemsize = len(peers), dtype.itemsize
        self._peers = peers
        start, stop = slice_of(numel, size, mine)
        self._reduction = SliceReduction(peers, mine, start, stop, dtype, op)
        self._offset_bytes, self._length, self._dtype = start * itemsize, stop - start, dtype
        self._plans: Kept[list[_Chunk]] = Kept()
        slices = [(rank, *slice_of(numel, size, rank)) for rank in range(size) if rank != mine]
        self._fetched = [(rank, start * itemsize, (stop - start) * itemsize) for rank, start, stop in slices]

    def run(self, tensor: torch.Tensor, addresses: Sequence[int], barrier: Callable[[], object]) -> None:
        """Combine in place.

        Args:
            tensor: contiguous.
            addresses: where each rank has its tensor. They all are there, and nobody writes to them.
            barrier: of all ranks.
        """
        here = tensor.data_ptr()
        plan = self._plans.get(here)
        if plan is None:
            plan = self._plan(here)
            self._plans.keep(here, plan, weight=len(plan))
        self._reduction.run(plan, addresses)
        barrier()
        read = self._peers.read
        for rank, offset_bytes, nbytes in self._fetched:
            read(rank, addresses[rank] + offset_bytes, here + offset_bytes, nbytes)
        barrier()

    def _plan(self, here: int) -> list[_Chunk]:
        """For a tensor that begins there, which it does not keep alive."""
        if self._length == 0:
            return []
        own = view_at(here + self._offset_bytes, self._length, self._dtype)
        return self._reduction.plan(own, own)
