from __future__ import annotations

import pytest

from syncline.collectives import InvalidArgumentError
from syncline.hooks.fragments import balanced_fragments, starts_at


@pytest.mark.parametrize(
    ("sizes", "count", "fragments"),
    [
        ([4, 3, 2, 1], 1, [[0, 1, 2, 3]]),
        ([4, 3, 2, 1], 2, [[0, 3], [1, 2]]),
        ([1, 1, 1, 1, 1], 2, [[0, 2, 4], [1, 3]]),
        ([9, 1, 1], 3, [[0], [1], [2]]),
        ([0, 0, 5], 3, [[2], [0], [1]]),
    ],
)
def test_fragments_have_about_the_same_size(sizes: list[int], count: int, fragments: list[list[int]]) -> None:
    assert balanced_fragments(sizes, count) == fragments


@pytest.mark.parametrize("count", [0, 3])
def test_fewer_items_than_fragments_are_refused(count: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"expected 1 to 2 fragments.*found {count}"):
        balanced_fragments([1, 1], count)


@pytest.mark.parametrize(
    ("fragments", "sync_every", "turns"),
    [
        (1, 3, {3: [0], 6: [0]}),
        (2, 4, {2: [0], 4: [1], 6: [0], 8: [1]}),
        (3, 2, {1: [1], 2: [0, 2], 3: [1], 4: [0, 2]}),
        (1, 1, {1: [0], 2: [0]}),
    ],
)
def test_each_fragment_has_its_turn_once_in_a_round(fragments: int, sync_every: int, turns: dict[int, list[int]]) -> None:
    found = {
        step: [number for number in range(fragments) if starts_at(step, number, fragments, sync_every)]
        for step in range(1, 2 * sync_every + 1)
    }
    assert {step: numbers for step, numbers in found.items() if numbers} == turns
