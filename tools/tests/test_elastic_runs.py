"""The parts of a run of elastic training that are read or drawn."""

from __future__ import annotations

import random

from elastic_runs import DURING_SHRINK, MOMENTS, draw_kills, members_at_each_step, recoveries

LOG = """1.0 applied step 2
3.0 rank lost or out of reach: x
3.5 member 1: generation 1 is (1, 2)
4.0 went on with 2 rank(s) at step 2
4.25 applied step 3
"""


def test_times_of_a_recovery_count_from_the_loss() -> None:
    assert recoveries(LOG, [2.0]) == [{"noticed": 1.0, "agreed": 1.5, "shrunk": 2.0, "applied": 2.25}]


def test_a_second_loss_in_the_same_recovery_counts_from_the_first() -> None:
    log = LOG.replace("4.0 went", "3.75 member 1: generation 2 is (1,)\n4.0 went")
    assert recoveries(log, [2.0, 3.25]) == [{"noticed": 1.0, "agreed": 1.75, "shrunk": 2.0, "applied": 2.25}]


def test_each_loss_has_its_recovery() -> None:
    later = "".join(f"1{line}\n" for line in LOG.splitlines())
    assert [each["noticed"] for each in recoveries(LOG + later, [2.0, 12.0])] == [1.0, 1.0]


def test_a_recovery_without_a_step_after_it_has_no_times() -> None:
    assert recoveries(LOG.replace("4.25 applied", "4.25 planned"), [2.0]) == []


def test_who_took_part_in_each_step() -> None:
    deaths = [(3, 2, DURING_SHRINK[0]), (0, 2, MOMENTS[0])]
    assert members_at_each_step(deaths, [4, 4, 3, 2], 4) == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3], [1, 2]]


def test_two_ranks_die_in_any_step() -> None:
    steps_of_deaths = set()
    for seed in range(50):
        (first, step, moment), (second, later, _) = draw_kills(random.Random(seed), 4, 10)
        assert first != second
        assert 0 <= step <= later < 10
        assert moment in MOMENTS
        steps_of_deaths.add(step)
    assert steps_of_deaths == set(range(10))
