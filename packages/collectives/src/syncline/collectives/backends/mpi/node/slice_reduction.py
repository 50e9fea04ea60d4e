"""Reducing what other processes have, by reading it there: for tensors of one size, planned beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ....reduce_op import Reduction
from ....reduction import reduce_into
from .peer_memory import PeerMemory
from .slicing import chunks, slice_of

# What is read at a time, of all together: when it is reduced it is still in the core's cache.
CHUNK_BYTES = 1 << 20


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
        self._op = op
        step = max(1, CHUNK_BYTES // (len(peers) * dtype.itemsize))
        self._chunks = []
        for begin, end in chunks(0, stop - start, step):
            terms = peers.landing(end - begin, dtype)
            reads = [(rank, terms[rank].data_ptr()) for rank in range(len(peers)) if rank != mine]
            offset_bytes, nbytes = (start + begin) * dtype.itemsize, (end - begin) * dtype.itemsize
            self._chunks.append((begin, end, offset_bytes, nbytes, reads, terms[:mine], terms[mine + 1 :]))

    def run(self, out: torch.Tensor, own: torch.Tensor, addresses: Sequence[int]) -> None:
        """Combine into `out`, which may be `own`: what this rank has there. Both are flat, from `start` to `stop`.

        Args:
            out: the result.
            own: only read, unless it is `out`.
            addresses: where each rank's tensor begins, of which the indices are.
        """
        read, op, is_whole = self._peers.read, self._op, len(self._chunks) == 1
        for begin, end, offset_bytes, nbytes, reads, before, after in self._chunks:
            for rank, landing in reads:
                read(rank, addresses[rank] + offset_bytes, landing, nbytes)
            mine = own if is_whole else own[begin:end]
            reduce_into(mine if out is own else out[begin:end], op, [*before, mine, *after])


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
        self._start, self._stop = slice_of(numel, size, mine)
        self._reduction = SliceReduction(peers, mine, self._start, self._stop, dtype, op)
        slices = [(rank, *slice_of(numel, size, rank)) for rank in range(size) if rank != mine]
        self._fetched = [(rank, start * itemsize, (stop - start) * itemsize) for rank, start, stop in slices]

    def run(self, tensor: torch.Tensor, addresses: Sequence[int], barrier: Callable[[], object]) -> None:
        """Combine in place.

        Args:
            tensor: flat.
            addresses: where each rank has its tensor. They all are there, and nobody writes to them.
            barrier: of all ranks.
        """
        own = tensor[self._start : self._stop]
        self._reduction.run(own, own, addresses)
        barrier()
        here, read = tensor.data_ptr(), self._peers.read
        for rank, offset_bytes, nbytes in self._fetched:
            read(rank, addresses[rank] + offset_bytes, here + offset_bytes, nbytes)
        barrier()
