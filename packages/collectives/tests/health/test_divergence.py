"""Where sequences of calls part: a table of histories and sentences."""

from __future__ import annotations

import pytest
import torch

from syncline.collectives.engine.call import DONE, CallRecord, Signature
from syncline.collectives.health.recorder import find_divergence

NAMES = {"a": "all_reduce", "b": "broadcast", "g": "all_gather"}


def history(letters: str, first: int = 1) -> list[CallRecord]:
    signatures = [Signature(NAMES[letter], dtype=torch.float32, shape=(2,)) for letter in letters]
    return [
        CallRecord(place, place + first, one.name, str(one), one.digest(), DONE, issued_at=0.0, where=f"train.py:{place + 1}")
        for place, one in enumerate(signatures)
    ]


@pytest.mark.parametrize(
    ("histories", "position", "sentence"),
    [
        (["aba", "aba"], None, ""),
        (["", ""], None, ""),
        (
            ["abga", "abga", "aga"],
            2,
            "rank 2 skipped broadcast #2 (it called all_gather(float32[2]) #2 at train.py:2); ranks 0, 1",
        ),
        (
            ["aga", "aga", "abga"],
            2,
            "rank 2 made a call that the others did not, broadcast(float32[2]) #2 at train.py:2; ranks 0, 1",
        ),
        (
            ["aab", "aab", "aa"],
            3,
            "rank 2 has not come to broadcast #3; ranks 0, 1 called broadcast(float32[2]) #3 at train.py:3",
        ),
        (
            ["aga", "abga", "abga"],
            2,
            "rank 0 skipped broadcast #2 (it called all_gather(float32[2]) #2 at train.py:2); ranks 1, 2",
        ),
        (["aa", "ab"], 2, "rank 1 called broadcast(float32[2]) #2 at train.py:2; rank 0 called all_reduce(float32[2]) #2"),
        (
            ["ab", "aga", "aga", "aga", "ab", "ab", "ab", "ab"],
            2,
            "ranks 1, 2, 3 called all_gather(float32[2]) #2 at train.py:2; ranks 0, 4-7 called broadcast(float32[2]) #2",
        ),
        (["a", "a", "", ""], 1, "ranks 2, 3 have not come to all_reduce #1; ranks 0, 1"),
        (["a", ""], 1, "rank 1 has not come to all_reduce #1; rank 0"),
    ],
)
def test_who_did_what(histories: list[str], position: int | None, sentence: str) -> None:
    found = find_divergence({rank: history(letters) for rank, letters in reversed(list(enumerate(histories)))})
    assert (None if found is None else found.position) == position
    if found is not None:
        assert found.sentence.startswith(sentence)


def test_only_what_all_remember_is_compared() -> None:
    assert find_divergence({0: history("gab", first=1), 1: history("ab", first=2)}) is None


def test_calls_that_have_not_begun_are_no_difference() -> None:
    queued = [CallRecord(5, None, "barrier", "barrier()", 0, "queued", 0.0, "?")]
    assert find_divergence({0: history("a") + queued, 1: history("a")}) is None


@pytest.mark.parametrize(
    ("begun", "sentence"),
    [
        (2, "rank 1 has not come to broadcast #2; rank 0 called"),
        (3, None),
    ],
)
def test_a_rank_that_remembers_only_sends_is_compared_from_its_next_call(begun: int, sentence: str | None) -> None:
    sends = [CallRecord(number, None, "send", "send()", 0, DONE, 0.0, "?") for number in range(9)]
    found = find_divergence({0: history("aab", first=0), 1: sends}, {0: 3, 1: begun})
    assert (None if found is None else found.sentence[: len(sentence or "")]) == sentence
