from __future__ import annotations

import pytest
import torch

from syncline.collectives import ReduceOp, premul_sum
from syncline.collectives.reduce_op import DTYPES_OF, FLOATS
from syncline.collectives.transports.nccl.communicator import NCCL_OPS, NCCL_TYPES, as_moved, as_reduced, native_reduction
from syncline.collectives.transports.nccl.library import load, preload_nccl

BY_NAME = {
    "NCCL_INT8": torch.int8,
    "NCCL_UINT8": torch.uint8,
    "NCCL_INT32": torch.int32,
    "NCCL_UINT32": torch.uint32,
    "NCCL_INT64": torch.int64,
    "NCCL_UINT64": torch.uint64,
    "NCCL_FLOAT16": torch.float16,
    "NCCL_FLOAT32": torch.float32,
    "NCCL_FLOAT64": torch.float64,
    "NCCL_BFLOAT16": torch.bfloat16,
}
OPS_BY_NAME = {
    "NCCL_SUM": ReduceOp.SUM,
    "NCCL_PROD": ReduceOp.PRODUCT,
    "NCCL_MIN": ReduceOp.MIN,
    "NCCL_MAX": ReduceOp.MAX,
    "NCCL_AVG": ReduceOp.AVG,
}
# Other names of the same types, as in NCCL's header.
ALIASES = {"NCCL_CHAR", "NCCL_INT", "NCCL_HALF", "NCCL_FLOAT", "NCCL_DOUBLE"}


@pytest.mark.filterwarnings("ignore::UserWarning")  # CuPy's, where there is no driver
def test_the_tables_are_cupys() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    nccl = load()
    if not nccl.available:
        pytest.skip("CuPy finds no NCCL")
    found = {name: getattr(nccl, name) for name in dir(nccl) if name.startswith("NCCL_")}
    types = {name: NCCL_TYPES[dtype] for name, dtype in BY_NAME.items()}
    ops = {name: NCCL_OPS[op] for name, op in OPS_BY_NAME.items()}
    assert {name: value for name, value in found.items() if name not in ALIASES} == {**types, **ops}
    assert len(types) == len(NCCL_TYPES)
    assert len(ops) == len(NCCL_OPS)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_cupy_has_every_call_that_is_made() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from test_support.fake_nccl import FakeCommunicator, FakeNccl

    preload_nccl()
    nccl = load()
    for fake, real in ((FakeNccl, nccl), (FakeCommunicator, nccl.NcclCommunicator)):
        called = {name for name in vars(fake) if not name.startswith("_")} - {"break_down", "enter_a_graph"}
        assert called
        assert called <= set(dir(real))
    # Cython keeps the names of the arguments in the first line of the docstring.
    for name in ("allReduce", "reduce", "reduceScatter", "broadcast", "allGather", "send", "recv", "commSplit"):
        signature = getattr(nccl.NcclCommunicator, name).__doc__.split("\n")[0]
        code = getattr(FakeCommunicator, name).__code__
        words = [word.strip(" )").split("=")[0].split()[-1] for word in signature.split("(", 1)[1].split(",")]
        assert list(code.co_varnames[: code.co_argcount])[1:] == [word for word in words if word not in ("self", "config")]


NATIVE = {
    ReduceOp.SUM: FLOATS | {torch.complex64, torch.complex128, torch.int8, torch.uint8, torch.int32, torch.int64},
    ReduceOp.AVG: FLOATS | {torch.complex64, torch.complex128, torch.int8, torch.uint8, torch.int32, torch.int64},
    ReduceOp.PRODUCT: FLOATS | {torch.int8, torch.uint8, torch.int32, torch.int64},
    ReduceOp.MIN: {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool},
    ReduceOp.MAX: {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool},
    ReduceOp.BAND: {torch.bool},
    ReduceOp.BOR: {torch.bool},
    ReduceOp.BXOR: set(),
}


@pytest.mark.parametrize("op", NATIVE)
def test_what_nccl_reduces_itself(op: ReduceOp) -> None:
    assert {dtype for dtype in DTYPES_OF[op] if native_reduction(op, dtype) is not None} == NATIVE[op]
    exact = {dtype for dtype in NATIVE[op] if not dtype.is_floating_point and not dtype.is_complex}
    assert {dtype for dtype in DTYPES_OF[op] if native_reduction(op, dtype, reproducible=True) is not None} == exact


def test_a_factor_is_multiplied_first() -> None:
    for dtype in DTYPES_OF[ReduceOp.PREMUL_SUM]:
        native = native_reduction(premul_sum(0.5), dtype)
        assert native is not None
        assert (native.op, native.factor) == (NCCL_OPS[ReduceOp.SUM], 0.5)


def test_how_tensors_are_seen() -> None:
    """No float travels as an integer into a reduction, and views share memory."""
    for dtype, seen in ((torch.complex64, torch.float32), (torch.complex128, torch.float64), (torch.bool, torch.uint8)):
        tensor = torch.zeros(6, dtype=dtype)
        assert as_reduced(tensor).dtype is seen
        assert as_reduced(tensor).data_ptr() == tensor.data_ptr()
    for dtype in FLOATS:
        assert as_reduced(torch.zeros(2, dtype=dtype)).dtype is dtype
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16, torch.complex64):
        tensor = torch.zeros(6, dtype=dtype)
        assert as_moved(tensor).dtype is torch.uint8
        assert as_moved(tensor).numel() == 6 * dtype.itemsize
        assert as_moved(tensor).data_ptr() == tensor.data_ptr()
