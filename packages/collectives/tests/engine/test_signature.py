"""The digest of a sequence of calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from syncline.collectives.health.call_digest import CallDigest


def digest_of(calls: Sequence[int]) -> tuple[int, int]:
    digest = CallDigest()
    for call in calls:
        digest.add(call)
    return digest.value, digest.count


def test_equal_sequences_have_equal_digests() -> None:
    assert digest_of([3, 1, 2]) == digest_of([3, 1, 2])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [2, 1]),
        ([1], [1, 1]),
        ([], [0]),
        ([0], [0, 0]),
        ([1, 2, 3], [1, 3]),
        ([1, 2, 3, 3], [1, 2, 2, 3]),
        ([5], [6]),
    ],
)
def test_other_sequences_have_other_digests(one: Sequence[int], other: Sequence[int]) -> None:
    assert digest_of(one)[0] != digest_of(other)[0]


def test_all_short_sequences_differ() -> None:
    sequences = [calls for length in range(6) for calls in itertools.product(range(4), repeat=length)]
    values = [digest_of(calls)[0] for calls in sequences]
    assert len(set(values)) == len(sequences)
    assert all(0 <= value < 2**62 for value in values)
