"""The tags under which messages travel."""

from __future__ import annotations

import pytest
import torch

from syncline.collectives import InvalidArgumentError
from syncline.collectives.engine.tags import sized_wire_tag, wire_tag
from syncline.collectives.health.agreement import different_splits

MOST = 2**31 - 1
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool, torch.float8_e5m2]


def test_each_tag_and_dtype_has_its_own() -> None:
    tags = {wire_tag(tag, dtype, MOST) for tag in (0, 1, 2, 32_767) for dtype in DTYPES}
    assert len(tags) == 4 * len(DTYPES)


def test_all_tags_that_mpi_promises_fit() -> None:
    assert wire_tag(32_767, torch.float32, 2**20 - 1) < 2**20
    assert wire_tag(32_767, torch.float32, 32_767) == 32_767
    assert 0 <= sized_wire_tag(32_767, torch.bool, 10**9, MOST) <= MOST


@pytest.mark.parametrize("numel", [1, 3, 2038, 2039, 2040, 2**20])
@pytest.mark.parametrize("more", [1, 2, 64, 1024, 4096])
def test_sizes_are_told_apart(numel: int, more: int) -> None:
    assert sized_wire_tag(1, torch.float32, numel, MOST) != sized_wire_tag(1, torch.float32, numel + more, MOST)


def test_a_tag_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="expected a tag of at most 32767 over this library, found 40000"):
        wire_tag(40_000, torch.float32, 2**20 - 1)


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ([[[1, 2], [1, 3]], [[3, 4], [2, 4]]], None),
        ([[[1, 2], [1, 3]], [[2, 4], [2, 4]]], "rank 0 sends 3 elements to rank 1, which expects 2"),
        ([[[1, 2], [1, 3]], [[3, 4], [5, 4]]], "rank 1 sends 5 elements to rank 0, which expects 2"),
        ([[[1], [1]]], None),
    ],
)
def test_splits(counts: list[list[list[int]]], problem: str | None) -> None:
    found = different_splits(counts)
    assert found is None if problem is None else (found or "").startswith(problem)
