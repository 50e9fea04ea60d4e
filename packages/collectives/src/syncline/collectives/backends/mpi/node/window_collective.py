"""Collectives on tensors that lie in a window, at the same place on every rank of a node."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import memmove
from typing import NamedTuple

import torch

from ....contract.deadline import Deadline
from ....contract.layout import flat, mark_written
from ....host.reduction import always_of
from ....host.transport import CallKind
from .algorithm import Algorithm, Operation, chunks, slice_of
from .plan import NodePlan, PlanRequest
from .windows import NodeMemory, Place

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

_MOST_PLACES = 32

#: Does this rank's share of a collective on the tensors of one place; given this rank's tensor.
Share = Callable[[torch.Tensor], None]
#: Makes the share for a place.
ShareMaker = Callable[[Place, CallKind], Share]


class WindowCollective(NodePlan):
    """Uses the window if all ranks have the tensor at the same place in one, and another plan for other tensors.

    Note [Slices]
    ~~~~~~~~~~~~~
    The ranks of a node cut a tensor into one slice for each. A rank touches its own slice only, but that in the memory of all:
    it reads the terms, combines them chunk by chunk, and writes each result into everybody's tensor while it is in the cache.
    So nobody waits in the middle. What remains is

    1. `verify` before: everybody's terms are there, and nobody uses a tensor that belongs to a collective;
    2. `wait` after: all slices have been written, and no rank touches another's tensor any more.

    What a rank wrote before is seen by those that come out: of a `ShmBarrier` because the processor keeps the order of writes
    (see `has_total_store_order`), of MPI because it hands its messages over in that way.

    Args:
        request: as for `NodePlan`.
        memory: where the windows are.
        elsewhere: the plan for other tensors.
    """

    in_window = Algorithm.WINDOW

    def __init__(self, request: PlanRequest, memory: NodeMemory, elsewhere: NodePlan) -> None:
        super().__init__(request)
        self._memory = memory
        self._windows = memory.windows
        self._elsewhere = elsewhere
        self.chosen = elsewhere.chosen
        # By the places' keys. A share keeps no window alive, and means something only while a tensor lies there.
        self._shares: dict[int, Share] = {}

    def run(self, tensor: torch.Tensor, whole: torch.Tensor, deadline: Deadline, *, is_verified: bool = False) -> None:
        """Compare where the ranks have the tensor, once the group has windows."""
        if self._memory.has_windows:
            key = self._windows.key_of(whole)
            if self._verify(tensor, deadline, key):
                self._run_in_window(key, tensor, deadline)
                mark_written(self._written(tensor, whole))
                self.chosen = self.in_window
                return
            is_verified = True
        self._elsewhere.run(tensor, whole, deadline, is_verified=is_verified)
        self.chosen = self._elsewhere.chosen

    def _run_in_window(self, key: int, tensor: torch.Tensor, deadline: Deadline) -> None:
        share = self._shares.get(key)
        if share is None:
            if len(self._shares) >= _MOST_PLACES:
                self._shares.clear()
            share = self._shares[key] = _SHARES[self._operation](self._windows.place(key), self._kind)
        share(tensor)
        self._wait(tensor, deadline)


class _Chunk(NamedTuple):
    """What is reduced at a time.

    Attributes:
        reduce: combines everybody's terms, into `out`.
        out: this rank's.
        source: its address.
        targets: the addresses where the other ranks want it.
        nbytes: its size.
    """

    reduce: Callable[..., object]
    out: torch.Tensor
    source: int
    targets: list[int]
    nbytes: int


def _all_reduce(place: Place, kind: CallKind) -> Share:
    """Reduce this rank's slice, chunk by chunk, and copy each result to the others."""
    mine, itemsize = place.segment.mine, kind.dtype.itemsize
    start, stop = slice_of(kind.numel, place.segment.parts, mine)
    planned = []
    for begin, end in _chunks(place, start, stop, kind.dtype):
        addresses = _addresses(place, begin * itemsize)
        terms = [tensor_from_address(address, end - begin, kind.dtype) for address in addresses]
        targets = addresses[:mine] + addresses[mine + 1 :]
        assert kind.op is not None
        reduce = always_of(terms, kind.op, kind.dtype)
        planned.append(_Chunk(reduce, terms[mine], addresses[mine], targets, (end - begin) * itemsize))

    def share(tensor: torch.Tensor) -> None:  # noqa: ARG001 - the place says where it is
        for reduce, out, source, targets, nbytes in planned:
            reduce(out=out)
            for target in targets:
                memmove(target, source, nbytes)

    return share


def _reduce_scatter(place: Place, kind: CallKind) -> Share:
    """Reduce this rank's part of all blocks."""
    start, itemsize = place.segment.mine * kind.numel, kind.dtype.itemsize
    planned = []
    for begin, end in _chunks(place, start, start + kind.numel, kind.dtype):
        terms = [tensor_from_address(a, end - begin, kind.dtype) for a in _addresses(place, begin * itemsize)]
        assert kind.op is not None
        planned.append((begin - start, end - start, always_of(terms, kind.op, kind.dtype)))

    def share(tensor: torch.Tensor) -> None:
        out = flat(tensor)
        if len(planned) == 1:
            planned[0][2](out=out)
            return
        for begin, end, reduce in planned:
            reduce(out=out[begin:end])

    return share


def _all_gather(place: Place, kind: CallKind) -> Share:
    """Copy this rank's tensor into everybody's block."""
    nbytes = kind.numel * kind.dtype.itemsize
    targets = _addresses(place, place.segment.mine * nbytes)

    def share(tensor: torch.Tensor) -> None:
        source = tensor.data_ptr()
        for target in targets:
            if target != source:
                memmove(target, source, nbytes)

    return share


def _broadcast(place: Place, kind: CallKind) -> Share:
    """Copy the root's tensor into this rank's."""
    nbytes = kind.numel * kind.dtype.itemsize
    source = _addresses(place, 0)[kind.root or 0]
    is_root = kind.root == place.segment.mine

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
    """Where an offset from the beginning of the tensor is, of each rank, in this process."""
    segment = place.segment
    first = segment.address() - segment.offset_of(segment.mine) + place.offset_bytes + offset_bytes
    return [first + segment.offset_of(part) for part in range(segment.parts)]


def _chunks(place: Place, start: int, stop: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    step = max(1, max(CHUNK_BYTES // place.segment.parts, LEAST_CHUNK_BYTES) // dtype.itemsize)
    return list(chunks(start, stop, step))


def tensor_from_address(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host as a flat tensor of one element or more, which does not keep it alive."""
    with torch.inference_mode(False):  # it serves calls outside that mode, too
        return torch.frombuffer((ctypes.c_byte * (numel * dtype.itemsize)).from_address(address), dtype=dtype, count=numel)
