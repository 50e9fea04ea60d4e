"""Growth with the number of ranks: formulas, fits, and counts of real ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import growth, growth_job
from benchmarks.growth_counting import Counts
from benchmarks.growth_formulas import FORMULAS, Fit, Formula, Job, fit
from test_support.full_run import cases


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (10_000, 14)])
def test_rounds_of_a_tree(ranks: int, rounds: int) -> None:
    assert Job(ranks).rounds == rounds


@pytest.mark.parametrize(
    ("terms", "factors"),
    [
        (("",), (7.0,)),
        (("", "log2 N"), (3.0, 2.0)),
        (("", "N"), (8.0, 2.0)),
        (("", "N", "N^2"), (500.0, 250.0, 5.0)),
    ],
)
def test_a_fit_finds_the_law_that_made_the_counts(terms: tuple[str, ...], factors: tuple[float, ...]) -> None:
    made = Fit(terms, factors)
    found = fit([(ranks, made.at(ranks)) for ranks in (2, 4, 8, 16, 32, 64)])
    assert found.terms == terms
    assert found.factors == pytest.approx(factors)
    assert found.at(10_000) == pytest.approx(made.at(10_000))


def test_a_fit_does_not_bend_to_few_points() -> None:
    """A parabola goes through any three points, so it could predict anything for ten thousand ranks."""
    assert fit([(2, 0.0), (4, 1.0), (8, 1.0)]).terms != ("", "N", "N^2")


def test_a_wrong_formula_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {ranks: {"comparison of calls": [Counts(messages=3 * int(math.log2(ranks)))] * ranks} for ranks in (2, 4, 8)}
    rows, is_right = growth.compared("gloo", found, 1)
    assert is_right
    assert rows[1] == ("comparison of calls", "messages", "3", "6", "9", "3 log2 N", "42", "held")
    monkeypatch.setitem(FORMULAS, ("gloo", "comparison of calls", "messages"), Formula("N + 1", lambda job: job.ranks + 1))
    rows, is_right = growth.compared("gloo", found, 1)
    assert not is_right
    assert rows[1][-1] == "WRONG"


@pytest.mark.parametrize(("per_host", "sizes"), cases([(1, (8,))], in_full=[(1, (16,)), (2, (8,))]))
def test_formulas_over_gloo_hold_for_real_ranks(per_host: int, sizes: tuple[int, ...]) -> None:
    """The median of few ranks would be the figure of rank 0, or of the last rank."""
    found = {ranks: growth.count("gloo", Job(ranks, per_host)) for ranks in sizes}
    rows, is_right = growth.compared("gloo", found, per_host)
    assert is_right, rows
    assert sum(row[-1] == "held" for row in rows) == sum(over == "gloo" for over, _, _ in FORMULAS)


def test_a_rank_that_fails_ends_the_wait_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth_job, "_MEET_S", 0.1)
    with pytest.raises(AssertionError, match="only 1 of 2 ranks came to: start-up"):
        growth_job._meet(tmp_path, 2, "start-up")
