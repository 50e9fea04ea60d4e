"""A rank of a Gloo job ends: the others hear of it soon, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.collectives.testing.processes import run_processes

JOB = Path(__file__).parent / "lost_rank_job.py"


@pytest.mark.parametrize("case", ["all_reduce", "recv", "split"])
def test_survivors_of_a_kill_are_told_who_is_lost(tmp_path: Path, case: str) -> None:
    (tmp_path / "case").write_text(case)
    run_processes(JOB, 3, tmp_path, killed=frozenset({1}))
    for rank in (0, 2):
        kind, ranks, seconds, words = (tmp_path / f"seen-{rank}").read_text().split("\n", 3)
        assert (kind, ranks) == ("RankLostError", "[1]"), words
        assert "rank(s) 1 (pid " in words
        assert float(seconds) < 10.0  # half of the time-out
