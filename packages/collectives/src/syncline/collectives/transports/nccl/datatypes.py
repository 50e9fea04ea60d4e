"""From torch dtypes and reductions to NCCL's: one table each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...reduce_op import BOOL, COMPLEX, FLOATS, INTEGERS, PremulSum, ReduceOp, Reduction
from ...tensors.layout import bytes_of

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

# On truth values stored as 0 and 1, and is the minimum, or the maximum.
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
        op: the value of ncclRedOp_t.
        factor: what each rank's terms are multiplied by first, or None.
    """

    op: int
    factor: float | None = None


def native_reduction(op: Reduction, dtype: torch.dtype, *, reproducible: bool = False) -> NativeReduction | None:
    """How NCCL reduces this, or None if the ranks must exchange the terms and reduce them themselves. A pure function.

    Not native are: what NCCL has not (int16, bitwise reductions of integers, products of complex numbers), minimum and maximum
    of floating point numbers (NCCL drops a not-a-number on some ranks), and, with `reproducible`, all whose result depends on
    the order of the terms.
    """
    if dtype in BOOL:
        return NativeReduction(NCCL_OPS[_OPS_ON_BOOL[op]]) if op in _OPS_ON_BOOL else None
    kind = ReduceOp.SUM if isinstance(op, PremulSum) else op
    if kind not in NCCL_OPS or (dtype not in NCCL_TYPES and dtype not in COMPLEX):
        return None
    if dtype not in INTEGERS and (reproducible or not _is_native_on_floats(kind, dtype)):
        return None
    return NativeReduction(NCCL_OPS[kind], op.factor if isinstance(op, PremulSum) else None)


def _is_native_on_floats(op: ReduceOp, dtype: torch.dtype) -> bool:
    return op in (ReduceOp.SUM, ReduceOp.AVG) or (op is ReduceOp.PRODUCT and dtype in FLOATS)


def as_reduced(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor as NCCL can reduce it: complex numbers as pairs of real ones, bool as uint8. Shares memory."""
    if tensor.dtype in COMPLEX:
        return torch.view_as_real(tensor).view(-1)
    return tensor.view(torch.uint8) if tensor.dtype in BOOL else tensor


def as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor as NCCL can move it: itself, or its bytes (bool, float8, complex, ...). Shares memory."""
    return tensor if tensor.dtype in NCCL_TYPES else bytes_of(tensor)
