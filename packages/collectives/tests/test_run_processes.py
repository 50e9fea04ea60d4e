"""Ranks as processes: what they printed is seen, however they end."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from syncline.collectives.testing.processes import run_processes

pytestmark = pytest.mark.launch

JOB = """
import os, signal, sys, time
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
print(f"rank {rank} of {size} was here", flush=True)
action = open(f"{folder}/action").read()
if action == "hang" and rank == 1:
    time.sleep(60)
if action == "die" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(3 if action == "fail" and rank == 1 else 0)
"""


def run(folder: Path, action: str, **options) -> None:
    (folder / "action").write_text(action)
    (folder / "job.py").write_text(JOB)
    run_processes(folder / "job.py", 2, folder, **options)


def test_all_is_well(tmp_path: Path) -> None:
    run(tmp_path, "nothing")
    assert (tmp_path / "output-1").read_text() == "rank 1 of 2 was here\n"


def test_a_rank_that_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run(tmp_path, "hang", timeout_s=3.0)
    said = capsys.readouterr().out.split("--- rank 1 ---")[1]
    assert "rank 1 of 2 was here" in said
    assert re.search(r'job\.py", line \d+ in <module>', said), "where it hangs"


def test_a_rank_that_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)the ranks ended with \[0, 3\].*rank 1 of 2 was here"):
        run(tmp_path, "fail")


def test_a_rank_that_is_to_be_killed(tmp_path: Path) -> None:
    run(tmp_path, "die", killed=frozenset({1}))
    with pytest.raises(AssertionError, match=r"\[0, -9\]"):
        run(tmp_path, "die")
    with pytest.raises(AssertionError, match=r"\[0, 0\]"):
        run(tmp_path, "nothing", killed=frozenset({1}))
