"""What a collective is, in words and as 32 bits that ranks compare."""

from __future__ import annotations

import pytest
import torch

from syncline.collectives import ReduceOp, premul_sum
from syncline.collectives.engine.call import Signature

MATRIX = torch.ones(10, 3)


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        (Signature("barrier"), "barrier()"),
        (Signature.of("all_gather", MATRIX), "all_gather(float32[10, 3])"),
        (Signature.of("all_reduce", MATRIX, ReduceOp.SUM), "all_reduce(float32[10, 3], op=SUM)"),
        (Signature.of("reduce", MATRIX.long(), ReduceOp.MAX, 2), "reduce(int64[10, 3], op=MAX, root=2)"),
        (Signature.of("broadcast", torch.ones(()), root=0), "broadcast(float32[], root=0)"),
        (Signature("allocate", detail="numel=3, dtype=torch.int8"), "allocate(numel=3, dtype=torch.int8)"),
        (Signature("all_to_all", detail="dtype=torch.int8", splits=((1,), (1,))), "all_to_all(dtype=torch.int8)"),
    ],
)
def test_words(signature: Signature, words: str) -> None:
    assert str(signature) == words


def test_tensors_alike_have_one_signature() -> None:
    """It is the key of a plan."""
    one, other = (Signature.of("reduce", torch.full((2, 3), value), ReduceOp.SUM, 1) for value in (1.0, 2.0))
    assert {one: "plan"}[other] == "plan"
    assert {Signature.of("all_reduce", MATRIX, premul_sum(0.5)): "plan"}[
        Signature.of("all_reduce", MATRIX, premul_sum(0.5))
    ] == "plan"


BASE = Signature.of("reduce", MATRIX, ReduceOp.SUM, 1)


@pytest.mark.parametrize(
    "other",
    [
        Signature.of("all_reduce", MATRIX, ReduceOp.SUM, 1),
        Signature.of("reduce", MATRIX, ReduceOp.MAX, 1),
        Signature.of("reduce", MATRIX, premul_sum(2.0), 1),
        Signature.of("reduce", MATRIX, ReduceOp.SUM, 0),
        Signature.of("reduce", MATRIX.double(), ReduceOp.SUM, 1),
        Signature.of("reduce", MATRIX.int(), ReduceOp.SUM, 1),
        Signature.of("reduce", torch.ones(31), ReduceOp.SUM, 1),
        Signature.of("reduce", MATRIX, ReduceOp.SUM, 1, "else"),
        Signature("reduce", ReduceOp.SUM, 1),
    ],
)
def test_what_would_make_a_result_wrong_has_another_digest(other: Signature) -> None:
    assert other.digest() != BASE.digest()
    assert 0 <= other.digest() < 2**32


@pytest.mark.parametrize(
    "other",
    [
        Signature.of("reduce", torch.ones(30), ReduceOp.SUM, 1),
        Signature.of("reduce", torch.ones(3, 5, 2), ReduceOp.SUM, 1),
        BASE._replace(device_type="cuda"),
        BASE._replace(splits=((1, 2), (2, 1))),
    ],
)
def test_shapes_devices_and_splits_may_differ_between_ranks(other: Signature) -> None:
    assert other.digest() == BASE.digest()
    assert other != BASE


def test_two_factors_are_two_reductions() -> None:
    digests = {Signature.of("all_reduce", MATRIX, premul_sum(factor)).digest() for factor in (0.5, 0.25, 1.0)}
    assert len(digests) == 3


def test_sizes() -> None:
    assert (BASE.numel, BASE.nbytes) == (30, 120)
    assert Signature.of("all_gather", torch.ones(0, 3)).nbytes == 0
    assert Signature.of("broadcast", torch.ones((), dtype=torch.int16)).nbytes == 2
    assert Signature("barrier").nbytes == 0
