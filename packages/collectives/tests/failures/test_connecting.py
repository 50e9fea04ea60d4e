"""What is said of a rank that waits until its group is there."""

from __future__ import annotations

import logging

import pytest

from syncline.collectives import RankLostError
from syncline.collectives.failures.connecting import Connecting, speakers


class Lost:
    """A liveness that knows of a loss."""

    def reason_to_give_up(self) -> RankLostError:
        return RankLostError("rank(s) 2 (pid 7 on b) ended", [2])


@pytest.mark.parametrize(("size", "found"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (64, [0, 32, 63])])
def test_three_ranks_speak_for_all(size: int, found: list[int]) -> None:
    assert speakers(size) == found


def test_the_watchdog_learns_in_which_step_it_sits() -> None:
    connecting = Connecting(5.0, 0)
    assert connecting.running_deadline is connecting.deadline
    connecting.set_place(1, 4)
    with connecting.step("MPI_Init: a process has not started MPI"):
        connecting.say_who_is_missing("rank 3 did not", speaks=True)
        assert connecting.missing_in_words() == (
            "rank 1 of 4 was not connected within 5 s (timeout); "
            "it is in MPI_Init: a process has not started MPI (rank 3 did not)"
        )
    assert "(rank 3" not in connecting.missing_in_words()


def test_a_rank_that_is_lost_meanwhile_is_named() -> None:
    connecting = Connecting(5.0, 0)
    connecting.liveness = Lost()  # type: ignore[assignment]
    assert "rank(s) 2 (pid 7 on b) ended" in connecting.missing_in_words()
    assert isinstance(connecting.reason_to_give_up(), RankLostError)
    connecting.deadline.cancel(connecting.reason_to_give_up())
    assert connecting.deadline.expired()


def test_nothing_is_watched_when_all_is_over() -> None:
    with Connecting(5.0, 0) as connecting:
        assert connecting.running_deadline is not None
    assert connecting.running_deadline is None


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0), (32, 1), (63, 1)])
def test_a_step_that_takes_long_is_told_once_by_those_that_speak(
    rank: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    connecting = Connecting(100.0, 30.0)
    connecting.set_place(rank, 64)
    with caplog.at_level(logging.WARNING, logger="syncline.collectives"), connecting.step("the meeting: not all came"):
        connecting.say_who_is_missing("rank 7 did not", speaks=connecting._speaks)
        connecting.look(connecting._since_s + 29.0)
        assert caplog.messages == []
        for later_s in (31.0, 40.0):
            connecting.look(connecting._since_s + later_s)
    assert (
        caplog.messages == [f"rank {rank} of 64 waits for 30 s and more in the meeting: not all came (rank 7 did not)"] * count
    )
