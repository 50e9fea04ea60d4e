"""Stall warnings: rank 0 says who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from syncline.collectives.engine.call import DONE, Call, Signature
from syncline.collectives.health.recorder import Recorder
from syncline.collectives.health.stalls import StallWatch, StatusPost, Waiting, stall_in_words

LIMIT_S = 30.0


class Lines(StatusPost):
    """What the ranks of a group have posted since rank 0 looked last."""

    def __init__(self, rank: int, lines: dict[int, str]) -> None:
        self.rank = rank
        self.lines = lines

    def post(self, line: str) -> None:
        self.lines[self.rank] = line

    def posted(self) -> Mapping[int, str]:
        lines = dict(self.lines)
        self.lines.clear()
        return lines


class Ranks:
    """A recorder and a watch for each of some ranks, which look one after the other; rank 0 first."""

    def __init__(self, size: int) -> None:
        lines: dict[int, str] = {}
        self.recorders = [Recorder("default", rank, range(size)) for rank in range(size)]
        self._watches = [StallWatch(recorder, Lines(recorder.rank, lines), LIMIT_S) for recorder in self.recorders]

    def begin(self, *ranks: int) -> list[Call]:
        calls = [Call(Signature.of("all_reduce", torch.ones(3)), 7) for _ in ranks]
        for rank, call in zip(ranks, calls, strict=True):
            self.recorders[rank].add(call)
            self.recorders[rank].begin(call)
        return calls

    def look(self, *now_s: float) -> None:
        for now in now_s:
            for watch in self._watches:
                watch.look(now)


def test_those_who_wait_and_the_one_they_wait_for(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(3)
    ranks.begin(0, 2)
    ranks.look(0, 29)
    assert not caplog.text
    ranks.look(30, 33, 36, 39)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "group 'default': a call has run for 30 s and more: ranks 0, 2 in all_reduce(float32[3]) #0 at test_stalls.py:"
    )
    assert record.getMessage().endswith("; not in a call: rank 1 (still computing, stopped, or gone)")


def test_a_rank_that_came_shortly_before_the_warning_is_in_the_call(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(3)
    ranks.begin(0)
    ranks.look(*range(25))
    ranks.begin(2)
    ranks.look(*range(25, 40))
    (record,) = caplog.records
    assert "ranks 0, 2 in all_reduce" in record.getMessage()
    assert "not in a call: rank 1 (" in record.getMessage()


def test_the_warning_does_not_wait_for_rank_0_if_it_came_late(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(3)
    ranks.begin(1)
    ranks.look(*range(26))
    ranks.begin(0)
    ranks.look(*range(26, 35))
    (record,) = caplog.records
    assert "ranks 0, 1 in all_reduce" in record.getMessage()


def test_others_wait_for_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(2)
    ranks.begin(1)
    ranks.look(0, 30, 33, 36)
    assert "rank 1 in all_reduce" in caplog.text
    assert "not in a call: rank 0" in caplog.text


@pytest.mark.parametrize("waits", [(0, 1, 2, 3), (0, 3), (1, 2, 3)])
def test_the_warning_comes_at_the_limit(caplog: pytest.LogCaptureFixture, waits: tuple[int, ...]) -> None:
    ranks = Ranks(4)
    ranks.begin(*waits)
    said_s = []
    for second in range(40):
        ranks.look(float(second))
        said_s += [second] * (len(caplog.records) - len(said_s))
    (at_s,) = said_s
    assert LIMIT_S <= at_s <= LIMIT_S + 2
    assert "ranks" in caplog.text


def test_a_call_that_ends_in_time_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(2)
    for began_s in (0, 29, 58):
        (call,) = ranks.begin(0)
        ranks.look(began_s, began_s + 28)
        call.is_over(DONE)
    assert not caplog.text


def test_each_stall_is_mentioned_once_and_the_next_again(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(2)
    for began_s in (0, 100):
        calls = ranks.begin(0, 1)
        ranks.look(began_s, began_s + 30, began_s + 33, began_s + 60, began_s + 90)
        for call in calls:
            call.is_over(DONE)
        ranks.look(began_s + 91, began_s + 92)
    assert ["#0" in record.getMessage() for record in caplog.records] == [True, False]


def test_after_the_end_nobody_looks(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(1)
    ranks.begin(0)
    for watch in ranks._watches:
        watch.stop()
    ranks.look(0, 30, 60, 90)
    assert not caplog.text


def test_ranks_that_wait_in_different_calls() -> None:
    waiting = {0: Waiting(3, "barrier() #3"), 1: Waiting(2, "broadcast(...) #2")}
    assert stall_in_words("default/0.1", (4, 6), waiting, 5) == (
        "group 'default/0.1': a call has run for 5 s and more: rank 4 in barrier() #3, rank 6 in broadcast(...) #2"
    )
