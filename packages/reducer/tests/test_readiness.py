from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.reducer import Readiness
from syncline.reducer.readiness import MarkedTwiceError


@pytest.mark.parametrize(
    ("buckets", "arrivals", "started"),
    [
        pytest.param([[0]], [0], [[0]], id="one"),
        pytest.param([[0, 1]], [1, 0], [[], [0]], id="the last of a bucket starts it"),
        pytest.param([[0], [1]], [0, 1], [[0], [1]], id="as they come"),
        pytest.param([[0], [1]], [1, 0], [[], [0, 1]], id="bucket 1 waits for bucket 0"),
        pytest.param([[2], [1], [0]], [0, 1, 2], [[], [], [0, 1, 2]], id="all wait for the first"),
        pytest.param([[0], [1], [2]], [0, 2, 1], [[0], [], [1, 2]], id="a gap in the middle"),
        pytest.param([[3, 1], [2, 0]], [0, 3, 2, 1], [[], [], [], [0, 1]], id="interleaved"),
    ],
)
def test_buckets_start_in_order(buckets: list[list[int]], arrivals: list[int], started: list[list[int]]) -> None:
    readiness = Readiness(buckets)

    assert [list(readiness.mark_ready([index])) for index in arrivals] == started


def test_several_gradients_may_be_marked_at_once() -> None:
    readiness = Readiness([[3, 1], [2, 0], [4]])
    assert list(readiness.mark_ready([4, 1, 0])) == []
    assert readiness.missing() == [2, 3]
    assert list(readiness.mark_ready([2, 3])) == [0, 1, 2]
    assert readiness.is_complete


@pytest.mark.parametrize(("before", "indices", "repeated"), [([], [1, 2, 1, 2], 1), ([2, 0], [1, 0, 1, 2], 0), ([1], [1], 1)])
def test_the_first_that_is_repeated_is_named(before: list[int], indices: list[int], repeated: int) -> None:
    readiness = Readiness([[0, 1], [2]])
    readiness.mark_ready(before)
    with pytest.raises(MarkedTwiceError) as raised:
        readiness.mark_ready(indices)
    assert raised.value.index == repeated


@st.composite
def arrivals_into_buckets(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    count = draw(st.integers(1, 30))
    members = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    edges = [0, *cuts, count]
    buckets = [list(members[a:b]) for a, b in pairwise(edges)]
    return buckets, list(draw(st.permutations(range(count))))


@given(arrivals_into_buckets())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_any_arrival_order_starts_every_bucket_once_in_order_and_not_early(case: tuple[list[list[int]], list[int]]) -> None:
    buckets, arrivals = case
    readiness = Readiness(buckets)
    seen: set[int] = set()
    started: list[int] = []

    for place, index in enumerate(arrivals):
        assert readiness.missing() == sorted(arrivals[place:])
        assert not readiness.is_complete
        seen.add(index)
        started += readiness.mark_ready([index])
        # As far as possible and no further: every started bucket is full, and the next one is not.
        assert all(seen.issuperset(buckets[number]) for number in started)
        assert len(started) == len(buckets) or not seen.issuperset(buckets[len(started)])

    assert started == list(range(len(buckets)))
    assert readiness.is_complete
    assert readiness.missing() == []


def test_marking_twice_is_an_error_that_knows_which_and_changes_nothing() -> None:
    readiness = Readiness([[0, 1], [2]])
    readiness.mark_ready([1])

    with pytest.raises(MarkedTwiceError, match="gradient 1 was marked ready twice") as caught:
        readiness.mark_ready([1])

    assert caught.value.index == 1
    assert readiness.missing() == [0, 2]
    assert list(readiness.mark_ready([0])) == [0]


def test_reset_forgets_everything() -> None:
    readiness = Readiness([[0], [1]])
    for index in (1, 0):
        readiness.mark_ready([index])

    readiness.reset()

    assert not readiness.is_complete
    assert readiness.missing() == [0, 1]
    assert [list(readiness.mark_ready([index])) for index in (0, 1)] == [[0], [1]]


@pytest.mark.parametrize("index", [-1, 2])
def test_an_unknown_gradient_is_an_error(index: Any) -> None:
    readiness = Readiness([[0], [1]])

    with pytest.raises(KeyError):
        readiness.mark_ready([index])

    assert readiness.missing() == [0, 1]
