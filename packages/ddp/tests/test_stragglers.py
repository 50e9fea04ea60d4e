from __future__ import annotations

import logging

import pytest
import torch

from syncline.collectives import InvalidArgumentError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel
from syncline.ddp.stragglers import Straggler, StragglerWatch, every_from, find_straggler
from syncline.reducer import IterationStatistics


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([[0.1, 0.2]], Straggler(1, 1, 1, 0.1)),
        ([[0.1, 0.2], [0.1, 0.4], [0.3, 0.1]], Straggler(1, 2, 3, 0.2)),
        ([[0.1, 0.2, 0.3, 0.8]] * 3 + [[0.9, 0.1, 0.1, 0.1]] * 2, Straggler(3, 3, 5, 0.6)),
        ([[0.1, 0.5], [0.2, 0.1]], Straggler(1, 1, 2, 0.4)),
    ],
)
def test_the_rank_that_is_last_most_often(steps: list[list[float]], expected: Straggler) -> None:
    found = find_straggler(steps)
    assert (found.rank, found.times_last, found.steps) == (expected.rank, expected.times_last, expected.steps)
    assert found.late_s == pytest.approx(expected.late_s)


def test_the_line() -> None:
    assert str(Straggler(3, 41, 50, 0.01234)) == "rank 3 was last in 41 of 50 steps, by 12.3 ms in the median"


def test_the_setting() -> None:
    assert every_from({}) is None
    assert every_from({"SYNCLINE_STRAGGLERS": "50"}) == 50


@pytest.mark.parametrize("text", ["0", "often", "-3", "1.5"])
def test_a_setting_that_makes_no_sense(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="SYNCLINE_STRAGGLERS: expected a number of steps of at least 1, found"):
        every_from({"SYNCLINE_STRAGGLERS": text})


def steps_of(rank: int) -> list[IterationStatistics]:
    """Six steps by a clock that each rank started at another time; rank 1 is 30 ms late in all but one."""
    zero = 1000.0 * rank
    late = [0.03 if rank == 1 and step != 2 else 0.0 for step in range(6)]
    return [
        IterationStatistics(zero + step, last_gradient=zero + step + 0.5 + late[step], finished=zero + step + 0.6)
        for step in range(6)
    ]


@pytest.mark.ranks
def test_a_line_every_so_many_steps_without_common_clocks(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: ProcessGroup) -> None:
        watch = StragglerWatch(group, every=5)
        for step in steps_of(group.rank):
            watch.note_step(step)

    with caplog.at_level(logging.WARNING, "syncline.ddp"):
        run_ranks(3, body)
    assert caplog.messages == ["rank 1 was last in 4 of 5 steps, by 30 ms in the median"]


@pytest.mark.ranks
def test_a_model_watches_its_stragglers(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_STRAGGLERS", "2")

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        for _ in range(5):
            model(torch.ones(1, 2)).sum().backward()

    with caplog.at_level(logging.WARNING, "syncline.ddp"):
        run_ranks(2, body)
    assert [" of 2 steps, by " in message for message in caplog.messages] == [True, True]


@pytest.mark.ranks
def test_it_ends_where_ranks_have_different_numbers_of_steps(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        model.watch_stragglers(every=1)
        with model.join():
            for _ in range(2 + group.rank):
                model(torch.ones(1, 2)).sum().backward()
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    with caplog.at_level(logging.WARNING, "syncline.ddp"):
        run_ranks(2, body)
    assert caplog.messages == []


@pytest.mark.ranks
def test_a_number_below_one_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        with pytest.raises(InvalidArgumentError, match="every: expected a number of steps of at least 1, found 0"):
            model.watch_stragglers(0)

    run_ranks(1, body)
