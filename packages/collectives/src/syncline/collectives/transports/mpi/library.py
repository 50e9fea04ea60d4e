"""Functions about the MPI library: its name, errors, datatypes, tags, requests, waiting, and failed ranks."""

from __future__ import annotations

import enum
import functools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from mpi4py import MPI
from typing_extensions import override

from ...engine.cancel_scope import CancelScope
from ...engine.transport import Request
from ...errors import DisagreementError, TransportError
from ...reduce_op import ReduceOp, Reduction
from ...startup.launch import tolerates_faults
from ...tensors.reduction import core_op
from .waiting import ARRIVAL_NAP_S, MESSAGE_NAP_S, Patience

# A test of a request costs about 0.3 us. A small collective between ranks of a node is over after a few tests.
_TESTS_BEFORE_YIELDING = 50
# Over a network a test costs more: 2 us with MPICH. Fewer tests than this cost time on a network of 3 GB/s. With 50 tests, four
# ranks on two cores used a fifth more processor time on a network of 0.1 GB/s.
_TESTS_BEFORE_NAPPING = 15


class Tag(enum.IntEnum):
    """The tags of messages on the private communicator of a Syncline group."""

    PAIRWISE = 1
    """`all_to_all`: the ranks' parts."""
    STATEMENTS = 2
    """`TimeoutReport`: the calls in which ranks wait."""
    NOTHING = 3
    """Never sent. A probe for it lets MPI make progress."""
    LEAVING = 4
    """`LeaveNotices`: the ranks that have left, and the calls that they started before."""
    RING = 5
    """`RingAllReduce`: pieces of the tensor."""
    STATUS = 6
    """`MPIStatusPost`: the call in which a rank waits."""
    GREETING = 7
    """`connect_neighbours`: empty messages."""
    SUBSET = 8
    """`MPITransport.subset`: the first of many tags."""


def library_name() -> str:
    """Return the name and version of the MPI library, such as "MPICH 5.0.2" or "Open MPI 5.0.11"."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


@contextmanager
def mpi_errors() -> Iterator[None]:
    """Return a context manager that turns errors of MPI into `TransportError`."""
    try:
        yield
    except MPI.Exception as error:
        raise mapped(error) from error


def mapped(error: MPI.Exception) -> TransportError:
    """Return the `TransportError` for an error of MPI."""
    return TransportError(f"{library_name()} reported: {error.Get_error_string()}")


_calling = threading.Lock()
_is_over = False
_LONGEST_CALL_S = 1.0


@contextmanager
def while_mpi_runs() -> Iterator[bool]:
    """Return a context manager for threads that call MPI now and then.

    After `with while_mpi_runs() as runs`, the thread may call MPI only if `runs` is True.
    """
    with _calling:
        yield not (_is_over or MPI.Is_finalized())


def no_more_mpi() -> None:
    """Make `while_mpi_runs` give False from now on. Call this function before MPI ends.

    If another thread is inside `while_mpi_runs`, this function waits for the thread, for at most one second.
    """
    global _is_over
    _is_over = True
    # Do not wait longer: the other thread may be blocked inside MPI.
    if _calling.acquire(timeout=_LONGEST_CALL_S):
        _calling.release()


def translated(members: MPI.Group, whole: MPI.Group) -> list[int]:
    """For each rank of the MPI group `members`, return its rank in the MPI group `whole`. Free `members`, but not `whole`."""
    try:
        return [int(rank) for rank in MPI.Group.Translate_ranks(members, list(range(members.Get_size())), whole)]
    finally:
        members.Free()


def wait(
    request: MPI.Request,
    scope: CancelScope,
    status: MPI.Status | None = None,
    *,
    longest_nap_s: float = ARRIVAL_NAP_S,
    naps_at_once: bool = False,
) -> None:
    """Block until an MPI request is complete. Between two tests of the request, the thread yields its core or sleeps.

    Args:
        request: the request.
        scope: the time limit, which can also be cancelled.
        status: an MPI status, which this function fills in.
        longest_nap_s: see `Patience`.
        naps_at_once: sleep between all tests, instead of yielding the core first. Use this only for a single message over a
            network: a collective takes many steps, and each sleep would delay a step.

    Raises:
        TimeoutError: the time limit was reached. The request stays active.
        BaseException: the scope was cancelled with this error. The request stays active.
    """
    # The thread does not only spin, because it may share its core with the backward pass. Measured on 2 cores (MPICH 5.0, 4
    # ranks, all_reduce of 4 bytes): spinning 6,700 us, `time.sleep(0)` 340 us, yielding 40 us, MPI's blocking call 36 us.
    for _ in range(_TESTS_BEFORE_NAPPING if naps_at_once else _TESTS_BEFORE_YIELDING):
        if request.Test(status):
            return
    patience = Patience(longest_nap_s, naps_at_once=naps_at_once)
    while not request.Test(status):
        if patience.rest_then_is_check_due():
            scope.check("MPI does not say which ranks do not take part")


class MPIRequest(Request):
    """A non-blocking MPI send or receive.

    The tensor stays alive until MPI has finished, even if this object is dropped earlier. A receive is never cancelled, because
    its message may be in flight already.
    """

    _abandoned: ClassVar[deque[tuple[MPI.Request, torch.Tensor]]] = deque()

    def __init__(self, request: MPI.Request, tensor: torch.Tensor, *, receives: bool = False) -> None:
        self._request = request
        self._receives = receives
        self._tensor = tensor
        self._status = MPI.Status()
        self._over = False

    @override
    def wait(self, scope: CancelScope) -> None:
        if not self._over:
            with self._errors():
                wait(self._request, scope, self._status, longest_nap_s=MESSAGE_NAP_S)
            self._end()

    @override
    def test(self) -> bool:
        if not self._over:
            with self._errors():
                is_over = self._request.Test(self._status)
            if is_over:
                self._end()
        return self._over

    def __del__(self) -> None:
        if not self._over:
            self._abandoned.append((self._request, self._tensor))  # no MPI call, because any thread may run this at any time

    @classmethod
    def free_abandoned(cls) -> None:
        """Release the tensors of dropped requests that MPI has completed by now."""
        for _ in range(len(cls._abandoned)):
            try:
                entry = cls._abandoned.popleft()
            except IndexError:  # another thread is in this function, too
                return
            try:
                is_over = entry[0].Test()
            except MPI.Exception:
                is_over = False  # not known; MPI may still use the tensor
            # MPI may still write to this tensor, so look again at the next send or receive.
            if not is_over:
                cls._abandoned.append(entry)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with mpi_errors():
                yield
        except TransportError as error:
            cause = error.__cause__
            # MPI itself checks that a message is not longer than the tensor. It does not say how long the message is.
            if isinstance(cause, MPI.Exception) and cause.Get_error_class() == MPI.ERR_TRUNCATE:
                raise DisagreementError(
                    f"the other rank sent more bytes than the {self._tensor.nbytes} bytes that this rank expects; make both "
                    "sides pass as many elements"
                ) from cause
            raise

    def _end(self) -> None:
        self._over = True
        # Do not use Get_count, because its result is a C int in Open MPI 4.
        if self._receives and (sent := self._status.Get_elements(MPI.BYTE)) != self._tensor.nbytes:
            raise DisagreementError(
                f"rank {self._status.Get_source()} sent {sent} bytes, this rank expects {self._tensor.nbytes}; make both sides "
                "pass as many elements"
            )

    @override
    def source(self) -> int | None:
        return self._status.Get_source() if self._over and self._receives else None


# Only Open MPI with `mpirun --with-ft ulfm` (ULFM) knows which ranks have failed. With other MPIs the functions below find no
# failed ranks and do nothing. MPICH and Intel MPI have the functions of ULFM, but when one rank fails, the whole job fails.


def is_fault_tolerant() -> bool:
    """Return whether the launcher started this job with an option that lets other ranks survive the loss of a rank."""
    return MPI.get_vendor()[0] == "Open MPI" and tolerates_faults()


def missing_for_shrink() -> str | None:
    """Return an error text, with a remedy, if the other ranks cannot continue after the loss of a rank; else None."""
    if is_fault_tolerant():
        return None
    # If only the option is missing, the user need not change the library.
    if MPI.get_vendor()[0] == "Open MPI":
        return "Open MPI was started without its tolerance of faults; start the job with `mpirun --with-ft ulfm`"
    return (
        f"{MPI.get_vendor()[0]} cannot go on when a rank is lost; use Open MPI with `mpirun --with-ft ulfm`, or backend "
        "'gloo' with init_method='file:///shared/folder'"
    )


def failed_ranks(communicator: MPI.Comm) -> list[int]:
    """Return the failed ranks of a communicator, as far as MPI knows them in this process.

    The call neither communicates nor blocks.
    """
    if not is_fault_tolerant() or MPI.Is_finalized():
        return []
    try:
        whole = communicator.Get_group()
        try:
            return translated(communicator.Get_failed(), whole)
        finally:
            whole.Free()
    except MPI.Exception:  # the communicator was freed meanwhile
        return []


def revoke(communicators: Iterable[MPI.Comm | None]) -> None:
    """End all operations on these communicators with an error, on all ranks. Without ULFM (MPI's fault tolerance), do nothing.

    If another process is stopped, for example by SIGSTOP, this function may block until the process continues.
    """
    if not is_fault_tolerant() or MPI.Is_finalized():
        return
    for communicator in communicators:
        try:
            if communicator is not None and not communicator.Is_revoked():
                communicator.Revoke()
        except MPI.Exception:
            pass  # the communicator was freed meanwhile


@contextmanager
def revoked_on_failure(*communicators: MPI.Comm) -> Iterator[None]:
    """Return a context manager that revokes the communicators if its body raises an error. Then no rank waits for ever."""
    try:
        yield
    except BaseException:
        revoke(communicators)
        raise


# The types that MPI itself can reduce. MPI has no portable type for float16, bfloat16 and float8, and must not reduce them as
# integers. `MPITransport` moves them as bytes and adds them in float32.
REDUCIBLE: dict[torch.dtype, MPI.Datatype] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.bool: MPI.C_BOOL,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}

_OPS: dict[ReduceOp, MPI.Op] = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVG: MPI.SUM,
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}

# MPI's C_BOOL has only logical reductions. For bools, each minimum, maximum or bitwise reduction equals a logical reduction.
_OPS_ON_BOOL: dict[ReduceOp, MPI.Op] = {
    ReduceOp.MIN: MPI.LAND,
    ReduceOp.BAND: MPI.LAND,
    ReduceOp.MAX: MPI.LOR,
    ReduceOp.BOR: MPI.LOR,
    ReduceOp.BXOR: MPI.LXOR,
}


_SMALL_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16})


@functools.lru_cache(maxsize=256)
def mpi_reduction(dtype: torch.dtype, op: Reduction) -> tuple[MPI.Datatype, MPI.Op] | None:
    """Return the MPI type and the MPI reduction for `op`. Return None if MPI's result would differ from `op`.

    For AVG and PREMUL_SUM, the MPI reduction is a SUM: the caller must also divide or multiply. The result is None for:

    - dtypes that are not in `REDUCIBLE`;
    - MIN and MAX of floats, because MPI's result for not-a-number depends on the rank;
    - sums of small integers: they must wrap around, but Open MPI's vector instructions stop at the largest value.
    """
    core = core_op(op)
    is_fickle = core in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_floating_point
    may_stick = core is ReduceOp.SUM and dtype in _SMALL_INTEGERS
    if dtype not in REDUCIBLE or is_fickle or may_stick:
        return None
    return REDUCIBLE[dtype], (_OPS_ON_BOOL if dtype is torch.bool else _OPS)[core]


def memory(tensor: torch.Tensor) -> MPI.buffer:
    """Return the memory of a contiguous tensor as a buffer for MPI. The caller must keep the tensor alive.

    For a CUDA tensor, this function waits for the current stream, because MPI does not use CUDA streams.
    """
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def message(tensor: torch.Tensor, unit_bytes: int) -> tuple[Any, ...]:
    """Return the arguments with which mpi4py moves a contiguous tensor as one message of bytes.

    The tensor may have more bytes than a C int can count. A tensor with more than `unit_bytes` bytes becomes one element of an
    MPI type. The other rank may use `MPI.BYTE` instead. The caller must keep the tensor alive until the message has been sent
    or received.
    """
    if tensor.nbytes <= unit_bytes:
        return memory(tensor), MPI.BYTE
    return memory(tensor), 1, _type_of(tensor.nbytes, unit_bytes)


@functools.cache  # the types are never freed, because few different sizes are that large
def _type_of(nbytes: int, unit_bytes: int) -> MPI.Datatype:
    units, rest = divmod(nbytes, unit_bytes)
    unit = MPI.BYTE.Create_contiguous(unit_bytes)
    # The rest that fills no whole unit follows as single bytes.
    made = MPI.Datatype.Create_struct([units, rest], [0, units * unit_bytes], [unit, MPI.BYTE]).Commit()
    unit.Free()
    return made
