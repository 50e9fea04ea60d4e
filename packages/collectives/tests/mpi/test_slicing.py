"""Slices and chunks as tables."""

from __future__ import annotations

import pytest

from syncline.collectives.backends.mpi.node.slicing import chunks, slice_of


@pytest.mark.parametrize(
    ("numel", "parts", "slices"),
    [
        (6, 3, [(0, 2), (2, 4), (4, 6)]),
        (8, 3, [(0, 3), (3, 6), (6, 8)]),
        (2, 3, [(0, 1), (1, 2), (2, 2)]),
        (5, 1, [(0, 5)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_slices(numel: int, parts: int, slices: list[tuple[int, int]]) -> None:
    assert [slice_of(numel, parts, index) for index in range(parts)] == slices


@pytest.mark.parametrize(
    ("start", "stop", "step", "expected"),
    [
        (0, 6, 3, [(0, 3), (3, 6)]),
        (2, 9, 3, [(2, 5), (5, 8), (8, 9)]),
        (4, 5, 100, [(4, 5)]),
        (4, 4, 3, []),
    ],
)
def test_chunks(start: int, stop: int, step: int, expected: list[tuple[int, int]]) -> None:
    assert list(chunks(start, stop, step)) == expected
