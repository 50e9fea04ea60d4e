"""Scripts for Horovod run with one changed import: the examples in packages/ddp/examples/horovod."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from test_support.full_run import cases
from test_support.jobs import LIMIT_S

pytestmark = pytest.mark.launch

EXAMPLES = Path(__file__).parent.parent / "packages" / "ddp" / "examples" / "horovod"


@pytest.mark.parametrize(
    "words", cases([[]], in_full=[["--fp16-allreduce"], ["--use-adasum"], ["--gradient-predivide-factor", "2"]]), ids=str
)
def test_digits_are_learnt(run_job: Any, words: list[str]) -> None:
    finished = run_job(2, "", str(EXAMPLES / "digits.py"), "--epochs", "4", *words)
    assert finished.status == 0, finished.output
    rights = [float(number) for number in re.findall(r"([\d.]+) % right", finished.output)]
    assert len(rights) == 4
    assert rights[-1] > 80


def test_the_synthetic_benchmark_runs(run_job: Any) -> None:
    finished = run_job(2, "", str(EXAMPLES / "synthetic.py"), "--num-iters", "2")
    assert finished.status == 0, finished.output
    assert "samples a second on each of 2 rank(s)" in finished.output


def run_elastic(python: list[str], folder: Path, ranks: int, *words: str) -> list[tuple[int, str]]:
    jobs = []
    for rank in range(ranks):
        command = [*python, str(EXAMPLES / "elastic.py"), "--meet", str(folder), *words]
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        jobs.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        outputs = [job.communicate(timeout=LIMIT_S)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(job.returncode, output) for job, output in zip(jobs, outputs, strict=True)]


@pytest.mark.parametrize("killed", cases([0], in_full=[None, 2]))
def test_an_elastic_training_goes_on_without_a_rank_that_was_killed(
    python: list[str], tmp_path: Path, killed: int | None
) -> None:
    words = () if killed is None else ("--kill", str(killed))
    found = run_elastic(python, tmp_path, 3, *words)
    assert [status == 0 for status, _ in found] == [rank != killed for rank in range(3)], found
    (line,) = re.findall(r"\d rank\(s\) at the end.*", "".join(output for _, output in found))
    assert line.startswith(f"{3 if killed is None else 2} rank(s)")
    assert "replicas equal: True" in line
    assert float(line.split(", ")[1].split()[0]) > 80
