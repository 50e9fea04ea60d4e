"""`Communicator` calls NCCL with tensors. No other module calls methods of CuPy's `NcclCommunicator`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import TransportError
from ...reduce_op import BOOL, COMPLEX, FLOATS, INTEGERS, PremulSum, ReduceOp, Reduction
from ...tensors.layout import bytes_of

_NO_COLOR = -1
_INVALID = (4, 5)  # ncclInvalidArgument, ncclInvalidUsage
_REMOTE = 6  # ncclRemoteError

# The values of ncclDataType_t; a test compares them with CuPy's constants.
NCCL_TYPES: dict[torch.dtype, int] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}

# The values of ncclRedOp_t; a test compares them, too.
NCCL_OPS: dict[ReduceOp, int] = {
    ReduceOp.SUM: 0,
    ReduceOp.PRODUCT: 1,
    ReduceOp.MAX: 2,
    ReduceOp.MIN: 3,
    ReduceOp.AVG: 4,
}

# On bools, which are stored as 0 and 1, "and" is the minimum and "or" is the maximum.
_OPS_ON_BOOL = {
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.BOR: ReduceOp.MAX,
}


@dataclass(frozen=True)
class NativeReduction:
    """A reduction that NCCL does itself.

    Attributes:
        op: NCCL's number for the reduction, a value of ncclRedOp_t.
        factor: the caller must multiply each rank's terms by this factor before the reduction. None: there is no factor.
    """

    op: int
    factor: float | None = None


def native_reduction(op: Reduction, dtype: torch.dtype, *, reproducible: bool = False) -> NativeReduction | None:
    """Return NCCL's own reduction for `op`. Return None if the ranks must exchange their tensors and reduce without NCCL.

    The result is None for:

    - reductions that NCCL lacks, such as all reductions of int16, bitwise reductions, and products of complex numbers;
    - minimum and maximum of floating point numbers, because NCCL drops a not-a-number on some ranks;
    - if `reproducible` is True, reductions whose result depends on the order of the terms.
    """
    if dtype in BOOL:
        return NativeReduction(NCCL_OPS[_OPS_ON_BOOL[op]]) if op in _OPS_ON_BOOL else None
    kind = ReduceOp.SUM if isinstance(op, PremulSum) else op
    if kind not in NCCL_OPS or (dtype not in NCCL_TYPES and dtype not in COMPLEX):
        return None
    # Integers are exact in any order, and NCCL does all of `NCCL_OPS` on them.
    if dtype not in INTEGERS and (reproducible or not _is_native_on_floats(kind, dtype)):
        return None
    return NativeReduction(NCCL_OPS[kind], op.factor if isinstance(op, PremulSum) else None)


def _is_native_on_floats(op: ReduceOp, dtype: torch.dtype) -> bool:
    return op in (ReduceOp.SUM, ReduceOp.AVG) or (op is ReduceOp.PRODUCT and dtype in FLOATS)


def as_reduced(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor as a view whose dtype NCCL can reduce: complex numbers as pairs of real numbers, bool as uint8."""
    if tensor.dtype in COMPLEX:
        return torch.view_as_real(tensor).view(-1)
    return tensor.view(torch.uint8) if tensor.dtype in BOOL else tensor


def as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the given flat tensor in a form that NCCL can send.

    If NCCL lacks the tensor's dtype (such as bool and complex dtypes), return a view of the tensor's bytes.
    """
    return tensor if tensor.dtype in NCCL_TYPES else bytes_of(tensor)


class Communicator:
    """Puts collectives on one CUDA stream. Tensors must be flat and on the communicator's GPU.

    No method waits for the GPU, so the caller must keep the tensors until the stream has finished. If a tensor is empty (then
    it is empty on all ranks), the methods do nothing.

    Args:
        raw: an object of CuPy's class `NcclCommunicator`.
        stream: the handle of the CUDA stream.
    """

    def __init__(self, nccl: Any, raw: Any, rank: int, size: int, stream: int) -> None:
        self._nccl = nccl
        self._raw = raw
        # CuPy calls ncclCommDestroy when it frees its object, and this call may wait for the other ranks of the node. A rank
        # that fails, drops a group, or forks must not wait, so only `abort` and `destroy` give this reference back.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))
        self._is_held = True
        self._stream = stream
        self._kept: list[torch.Tensor] | None = None  # inside `group`: the tensors of its calls
        self.rank = rank
        self.size = size

    @classmethod
    def connect(cls, nccl: Any, unique_id: bytes, rank: int, size: int, stream: int) -> Communicator:
        """Connect with the other ranks that pass the same id. Block until all `size` ranks have come."""
        with nccl_errors(nccl, "ncclCommInitRank"):
            return cls(nccl, nccl.NcclCommunicator(size, unique_id, rank), rank, size, stream)

    def split(self, members: Sequence[int] | None, stream: int) -> Communicator | None:
        """Make a communicator of `members`, which are ranks in this communicator. All ranks call this method.

        No operation of this communicator may be in flight. `stream` is the handle of the new communicator's CUDA stream. One
        call may make several new communicators, which share no rank. All members of a new communicator pass the same `members`.
        A rank that is in no new communicator passes None, and gets None.
        """
        with nccl_errors(self._nccl, "ncclCommSplit"):
            if members is None:  # a rank outside of all parts must call NCCL, too
                self._raw.commSplit(_NO_COLOR, 0)
                return None
            rank = list(members).index(self.rank)
            # NCCL's color is an int of 32 bits, and the program's color may be larger. Each member is in one part only.
            return Communicator(self._nccl, self._raw.commSplit(members[0], rank), rank, len(members), stream)

    # ---- reductions ----

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        """Reduce in place, on all ranks."""
        if tensor.numel():
            address, count, datatype = self._wire(tensor)
            self._call("allReduce", address, address, count, datatype, op)

    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        """Reduce in place on the root. The tensors of other ranks do not change."""
        if tensor.numel():
            address, count, datatype = self._wire(tensor)
            self._call("reduce", address, address, count, datatype, op, root)

    def reduce_scatter(self, output: torch.Tensor, block: torch.Tensor, op: int) -> None:
        """Reduce the blocks, and write part r of the result to rank r's output. A block has `size` parts."""
        if output.numel():
            address, count, datatype = self._wire(output)
            self._call("reduceScatter", self._wire(block)[0], address, count, datatype, op)

    # ---- moves ----

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to all ranks, in place."""
        if tensor.numel():
            address, count, datatype = self._wire(as_moved(tensor))
            self._call("broadcast", address, address, count, datatype, root)

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gather the `tensor` of each rank into `block`, which is `size` times as long. `tensor` may be a part of `block`."""
        if tensor.numel():
            address, count, datatype = self._wire(as_moved(tensor))
            self._call("allGather", address, self._wire(as_moved(block))[0], count, datatype)

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Send to another rank. Two ranks that send to each other must do so inside the context of `Communicator.group`."""
        if tensor.numel():
            self._call("send", *self._wire(as_moved(tensor)), peer)

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        """Receive from another rank."""
        if tensor.numel():
            self._call("recv", *self._wire(as_moved(tensor)), peer)

    def _call(self, name: str, *arguments: int) -> None:
        with nccl_errors(self._nccl, f"nccl{name[0].upper()}{name[1:]}"):
            getattr(self._raw, name)(*arguments, self._stream)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Return a context manager. When the context ends, NCCL starts all calls inside the context as one operation.

        Contexts may be nested. This object keeps the calls' tensors alive until the end of the outermost context.
        """
        # NCCL uses the addresses at the outermost end, so an inner context adds to the list of the outer one.
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
        """Raise a `TransportError` if NCCL has found an asynchronous error, such as the loss of a peer."""
        with nccl_errors(self._nccl, "an operation in flight"):
            self._raw.check_async_error()

    def abort(self) -> None:
        """End all operations in flight on this rank. Any thread may call this method, even if another thread is inside NCCL.

        Note [Abort of a blocking communicator]
        ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
        NCCL guarantees a safe abort only if the communicator is non-blocking, and no thread is inside NCCL. Here, neither
        condition holds: CuPy 14 makes blocking communicators, and the usual reason to abort is a thread that is stuck inside
        NCCL. Normally the abort ends the kernels, and the stuck call returns an error. Two other outcomes are possible:

        1. The abort or the stuck call does not return. Each abort runs on its own thread, so only the end of the process waits
           for this thread, for a few seconds.
        2. NCCL frees the communicator while the stuck thread still uses it, and a signal kills the process.

        We accept both outcomes, because they happen only in a group that has failed.
        """
        self._raw.abort()
        self._let_go()

    def destroy(self) -> None:
        """Destroy the communicator. No operation may be in flight."""
        with nccl_errors(self._nccl, "ncclCommDestroy"):
            self._raw.destroy()
        self._let_go()

    def _let_go(self) -> None:
        if self._is_held:
            self._is_held = False
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._raw))


@contextmanager
def _group(nccl: Any) -> Iterator[None]:
    with nccl_errors(nccl, "ncclGroupStart"):
        nccl.groupStart()
    try:
        yield
    except BaseException:
        with suppress(Exception):  # the first error is raised below, and says more
            nccl.groupEnd()  # without this, the thread would stay inside the group
        raise
    with nccl_errors(nccl, "ncclGroupEnd"):
        nccl.groupEnd()


@contextmanager
def nccl_errors(nccl: Any, what: str) -> Iterator[None]:
    """Return a context manager that turns errors of NCCL into `TransportError`."""
    try:
        yield
    except nccl.NcclError as error:
        raise TransportError(f"NCCL reported from {what}: {error}{_remedy(error.status)}") from error
    except KeyError as error:  # CuPy has no names for the statuses from 7 on, so it fails to build its own error
        raise TransportError(f"NCCL reported status {error} from {what}") from error


def _remedy(status: int) -> str:
    if status == _REMOTE:
        return ". A rank of the group died, or lost its network; the rank that failed first says why"
    if status in _INVALID:
        return ". Ranks of different sizes, types or calls are the usual cause"
    return ""


def version_in_words(nccl: Any) -> str:
    """Return NCCL's version as text, such as "2.27.7"."""
    number = int(nccl.get_version())  # 10000 * major + 100 * minor + patch
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
