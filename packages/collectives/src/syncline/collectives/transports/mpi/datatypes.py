"""Translate torch dtypes and our reductions to MPI's, and describe tensors as MPI messages."""

from __future__ import annotations

import functools
from typing import Any

import torch
from mpi4py import MPI

from ...reduce_op import ReduceOp, Reduction
from ...tensors.reduction import core_op

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

# MPI's C_BOOL has only logical reductions. On bools they are the same as minimum, maximum and the bitwise reductions.
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
    """Return the MPI type and the MPI reduction that give exactly the result of `op`, or None if MPI has none.

    For AVG and PREMUL_SUM the reduction is a SUM. The caller divides the result of AVG, and multiplies the terms of PREMUL_SUM
    before the reduction. The function returns None for:

    - dtypes that are not in `REDUCIBLE`.
    - MIN and MAX of floats: with not-a-number, MPI's result depends on the rank.
    - sums of small integers: they must wrap around, but Open MPI's vector instructions stop at the largest value.
    """
    core = core_op(op)
    is_fickle = core in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_floating_point
    may_stick = core is ReduceOp.SUM and dtype in _SMALL_INTEGERS
    if dtype not in REDUCIBLE or is_fickle or may_stick:
        return None
    return REDUCIBLE[dtype], (_OPS_ON_BOOL if dtype is torch.bool else _OPS)[core]


def memory(tensor: torch.Tensor) -> MPI.buffer:
    """Return a contiguous tensor's memory, so that MPI can read and write it. The caller keeps the tensor alive.

    MPI knows nothing of CUDA streams. So for a CUDA tensor, this function blocks until the current stream is finished.
    """
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def message(tensor: torch.Tensor, unit_bytes: int) -> tuple[Any, ...]:
    """Describe a contiguous tensor of any size as one message of bytes. MPI before version 4 counts in C ints.

    Args:
        tensor: as for `memory`.
        unit_bytes: a tensor with more bytes than this is sent as one element of an MPI type that consists of units of this
            size. The type is not part of the message, so the other rank may count in bytes.
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
