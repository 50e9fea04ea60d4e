"""One NCCL communicator: tensors in, NCCL calls out. The only module that calls `cupy.cuda.nccl`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import TransportError
from .datatypes import NCCL_TYPES, as_moved

_NO_COLOR = -1
_INVALID = (4, 5)  # ncclInvalidArgument, ncclInvalidUsage
_REMOTE = 6  # ncclRemoteError


class Communicator:
    """Puts collectives on one CUDA stream. Every tensor is flat and on the communicator's GPU, and outlives what is put there.

    Nothing here waits for the GPU. Nothing is sent for tensors without elements: their pointers mean nothing to NCCL, and all
    ranks agree on their size.

    Args:
        nccl: the module `cupy.cuda.nccl`, or a fake.
        raw: its `NcclCommunicator`.
        stream: the handle of the CUDA stream.
    """

    def __init__(self, nccl: Any, raw: Any, rank: int, size: int, stream: int) -> None:
        self._nccl = nccl
        self._raw = raw
        self._stream = stream
        self._kept: list[torch.Tensor] | None = None  # inside a group, what its calls will read and write
        self.rank = rank
        self.size = size

    @classmethod
    def connect(cls, nccl: Any, unique_id: bytes, rank: int, size: int, stream: int) -> Communicator:
        """Meet the other ranks, who have the same id. Blocks until all are there."""
        with mapped(nccl, "ncclCommInitRank"):
            return cls(nccl, nccl.NcclCommunicator(size, unique_id, rank), rank, size, stream)

    def split(self, members: Sequence[int] | None, color: int | None, stream: int) -> Communicator | None:
        """Another communicator, of `members` (ranks of this one); all ranks call, nothing may be in flight."""
        with mapped(self._nccl, "ncclCommSplit"):
            if members is None or color is None:
                self._raw.commSplit(_NO_COLOR, 0)
                return None
            rank = list(members).index(self.rank)
            return Communicator(self._nccl, self._raw.commSplit(color, rank), rank, len(members), stream)

    # ---- reductions ----

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        """In place."""
        if tensor.numel():
            address, count, datatype = self._wire(tensor)
            with mapped(self._nccl, "ncclAllReduce"):
                self._raw.allReduce(address, address, count, datatype, op, self._stream)

    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        """In place on the root; elsewhere only read."""
        if tensor.numel():
            address, count, datatype = self._wire(tensor)
            with mapped(self._nccl, "ncclReduce"):
                self._raw.reduce(address, address, count, datatype, op, root, self._stream)

    def reduce_scatter(self, output: torch.Tensor, block: torch.Tensor, op: int) -> None:
        """`block` is as long as `size` outputs."""
        if output.numel():
            address, count, datatype = self._wire(output)
            with mapped(self._nccl, "ncclReduceScatter"):
                self._raw.reduceScatter(self._wire(block)[0], address, count, datatype, op, self._stream)

    # ---- moves ----

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """In place."""
        if tensor.numel():
            address, count, datatype = self._wire(as_moved(tensor))
            with mapped(self._nccl, "ncclBroadcast"):
                self._raw.broadcast(address, address, count, datatype, root, self._stream)

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor) -> None:
        """`block` is as long as `size` tensors; `tensor` may be this rank's part of it."""
        if tensor.numel():
            address, count, datatype = self._wire(as_moved(tensor))
            with mapped(self._nccl, "ncclAllGather"):
                self._raw.allGather(address, self._wire(as_moved(block))[0], count, datatype, self._stream)

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """To another rank; two that send to one another must do so in a `group`."""
        if tensor.numel():
            address, count, datatype = self._wire(as_moved(tensor))
            with mapped(self._nccl, "ncclSend"):
                self._raw.send(address, count, datatype, peer, self._stream)

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        """From another rank."""
        if tensor.numel():
            address, count, datatype = self._wire(as_moved(tensor))
            with mapped(self._nccl, "ncclRecv"):
                self._raw.recv(address, count, datatype, peer, self._stream)

    @contextmanager
    def group(self) -> Iterator[None]:
        """What is called inside becomes one operation, which starts at the end of the context; groups may be nested.

        NCCL notes addresses and comes back to them at the end: so the tensors are kept until then.
        """
        outermost = self._kept is None
        self._kept = [] if self._kept is None else self._kept
        try:
            with _group(self._nccl):
                yield
        finally:
            if outermost:
                self._kept = None

    def _wire(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        if self._kept is not None:
            self._kept.append(tensor)
        return tensor.data_ptr(), tensor.numel(), NCCL_TYPES[tensor.dtype]

    # ---- the end ----

    def check(self) -> None:
        """Raise what went wrong since, such as a peer that is gone.

        Raises:
            TransportError: something did.
        """
        with mapped(self._nccl, "an operation in flight"):
            self._raw.check_async_error()

    def abort(self) -> None:
        """End what is in flight, on this rank. Any thread may call it, also while another is inside a call."""
        self._raw.abort()

    def destroy(self) -> None:
        """Give it back; nothing may be in flight."""
        with mapped(self._nccl, "ncclCommDestroy"):
            self._raw.destroy()


@contextmanager
def _group(nccl: Any) -> Iterator[None]:
    with mapped(nccl, "ncclGroupStart"):
        nccl.groupStart()
    try:
        yield
    except BaseException:
        try:
            nccl.groupEnd()  # this thread must not stay inside a group
        except Exception:  # noqa: BLE001 - the first error is the one to tell
            pass
        raise
    with mapped(nccl, "ncclGroupEnd"):
        nccl.groupEnd()


@contextmanager
def mapped(nccl: Any, what: str) -> Iterator[None]:
    """Turn NCCL's errors into ours.

    Raises:
        TransportError: NCCL raised.
    """
    try:
        yield
    except nccl.NcclError as error:
        raise TransportError(f"NCCL reported from {what}: {error}{_remedy(error.status)}") from error
    except KeyError as error:  # CuPy knows no name for the states from 7 on, and fails to say so
        raise TransportError(f"NCCL reported status {error} from {what}") from error


def _remedy(status: int) -> str:
    if status == _REMOTE:
        return ". A rank of the group died, or lost its network; the rank that failed first says why"
    if status in _INVALID:
        return ". Ranks of different sizes, types or calls are the usual cause"
    return ""
