"""Collectives on tensors in a window (memory that all ranks of a node have mapped), at the same place on all ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import memmove
from typing import NamedTuple

import torch

from ....engine.call import Call, Signature
from ....tensors.layout import flat
from ....tensors.reduction import reducer_of
from .choice import Operation, chunks, slice_of
from .memory import Node, Place
from .plan import WindowAlgorithm

# The size of a chunk, for all ranks together. A rank copies a chunk of the result to the others while this chunk is in the
# cache. The table shows microseconds for two ranks, with huge pages and a cache of 2 MiB for each core. Each row is a tensor
# size, and each column is a chunk size. All cases were measured in turn on the same memory:
#
#            256 KiB   512 KiB   1 MiB   2 MiB   4 MiB
#    4 MiB       258       243     243     277     318
#   25 MiB     3,959     3,873   4,170   4,445   4,900
#   64 MiB     8,173     8,415   8,630   8,810  10,526
CHUNK_BYTES = 512 << 10
# A rank's chunk is not smaller than this, because each chunk costs a call. (This limit makes a collective of 8 MiB 1.1 times
# faster with 8 ranks, and 1.2 times faster with 16 ranks.)
LEAST_CHUNK_BYTES = 128 << 10

_MOST_PLACES = 32

#: Does this rank's share of a collective on the tensors at one place. The argument is this rank's tensor.
Share = Callable[[torch.Tensor], None]
#: Makes the share for a place.
ShareMaker = Callable[[Place, Signature], Share]


class SlicesInWindow(WindowAlgorithm):
    """Each rank reduces or copies its share directly in the tensors of all ranks.

    Note [Slices]
    ~~~~~~~~~~~~~
    The ranks of a node divide a tensor into one slice for each rank. A rank uses only its own slice, in the tensors of all
    ranks. The rank reduces the terms of all ranks chunk by chunk, and writes each result into all tensors. Only two waits are
    necessary:

    1. `Sync.compare` before the reduction, in `NodePlan.run`, for all ranks of the group. After this wait, all terms are
       written, and no program uses its tensor.
    2. `Sync.wait` after the reduction, for the ranks of this node. After this wait, all slices are written, and no rank uses
       another rank's tensor.

    After each wait, a rank sees all data that the other ranks wrote before. The fences of a `ShmBarrier` guarantee this (see
    Note [Order in memory] in `shared_sync`). If the ranks wait by messages, MPI guarantees this.
    """

    name = "window"

    def __init__(self, node: Node, signature: Signature, operation: Operation) -> None:
        self._node = node
        self._signature = signature
        self._make_share = _SHARES[operation]
        # The shares by place key. A share does not keep its window alive, so use it only while a tensor is there.
        self._shares: dict[int, Share] = {}

    def run(self, place_key: int, part: torch.Tensor, call: Call) -> None:
        """See `WindowAlgorithm.run`."""
        share = self._shares.get(place_key)
        if share is None:
            # A program that uses so many places makes new tensors all the time, so old shares are of little use.
            if len(self._shares) >= _MOST_PLACES:
                self._shares.clear()
            place = self._node.windows.place(place_key)
            share = self._shares[place_key] = self._make_share(place, self._signature)
        share(part)
        self._node.local_sync(call).wait(call)


class _Chunk(NamedTuple):
    """A chunk of the slice that this rank reduces: see Note [Slices].

    Attributes:
        reduce: combines the terms of all ranks, into `out`.
        out: the chunk in this rank's tensor, at the address `source`.
        targets: the addresses of the chunk in the other ranks' tensors.
    """

    reduce: Callable[..., object]
    out: torch.Tensor
    source: int
    targets: list[int]
    nbytes: int


def _all_reduce(place: Place, signature: Signature) -> Share:
    mine, itemsize = place.segment.mine, signature.element_dtype.itemsize
    start, stop = slice_of(signature.numel, place.segment.parts, mine)
    planned = []
    for begin, end in _chunks(place, start, stop, signature.element_dtype):
        addresses = _addresses(place, begin * itemsize)
        terms = [tensor_from_address(address, end - begin, signature.element_dtype) for address in addresses]
        targets = addresses[:mine] + addresses[mine + 1 :]
        reduce = reducer_of(terms, signature.reduction, signature.element_dtype)
        planned.append(_Chunk(reduce, terms[mine], addresses[mine], targets, (end - begin) * itemsize))

    def share(tensor: torch.Tensor) -> None:  # noqa: ARG001 - the place says where the tensor is
        for reduce, out, source, targets, nbytes in planned:
            reduce(out=out)
            for target in targets:
                memmove(target, source, nbytes)

    return share


def _reduce_scatter(place: Place, signature: Signature) -> Share:
    start, itemsize = place.segment.mine * signature.numel, signature.element_dtype.itemsize
    planned = []
    for begin, end in _chunks(place, start, start + signature.numel, signature.element_dtype):
        terms = [tensor_from_address(a, end - begin, signature.element_dtype) for a in _addresses(place, begin * itemsize)]
        planned.append((begin - start, end - start, reducer_of(terms, signature.reduction, signature.element_dtype)))

    def share(tensor: torch.Tensor) -> None:
        out = flat(tensor)
        # A small tensor is one chunk, so it needs no slicing.
        if len(planned) == 1:
            planned[0][2](out=out)
            return
        for begin, end, reduce in planned:
            reduce(out=out[begin:end])

    return share


def _all_gather(place: Place, signature: Signature) -> Share:
    nbytes = signature.nbytes
    targets = _addresses(place, place.segment.mine * nbytes)

    def share(tensor: torch.Tensor) -> None:
        source = tensor.data_ptr()
        for target in targets:
            if target != source:  # this rank's tensor may be its own part of the block
                memmove(target, source, nbytes)

    return share


def _broadcast(place: Place, signature: Signature) -> Share:
    nbytes = signature.nbytes
    source = _addresses(place, 0)[signature.root_rank]
    is_root = signature.root == place.segment.mine

    def share(tensor: torch.Tensor) -> None:
        if not is_root:
            memmove(tensor.data_ptr(), source, nbytes)

    return share


_SHARES: dict[Operation, ShareMaker] = {
    Operation.ALL_REDUCE: _all_reduce,
    Operation.REDUCE_SCATTER: _reduce_scatter,
    Operation.ALL_GATHER: _all_gather,
    Operation.BROADCAST: _broadcast,
}


def _addresses(place: Place, offset_bytes: int) -> list[int]:
    """For each rank, return the address at which this process sees byte `offset_bytes` of the rank's tensor."""
    segment = place.segment
    first = segment.address() - segment.offset_of(segment.mine) + place.offset_bytes + offset_bytes
    return [first + segment.offset_of(part) for part in range(segment.parts)]


def _chunks(place: Place, start: int, stop: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    step = max(1, max(CHUNK_BYTES // place.segment.parts, LEAST_CHUNK_BYTES) // dtype.itemsize)
    return list(chunks(start, stop, step))


def tensor_from_address(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor of one or more elements over host memory. The tensor does not keep the memory alive."""
    with torch.inference_mode(False):  # the tensor is kept for later calls, which may be outside of this mode
        return torch.frombuffer((ctypes.c_byte * (numel * dtype.itemsize)).from_address(address), dtype=dtype, count=numel)
