"""One failure on 4 ranks prints few lines: one rank says all, and the others point to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.launch

MOST_LINES = 30
MOST_CHARACTERS = 200
FULL = "Traceback (most recent call last)"

BEGIN = """
import os, signal, subprocess, sys, time
import torch
from syncline import collectives
group = collectives.init_process_group(timeout=60)
rank, ones = group.rank, torch.ones(4)
collectives.all_reduce(ones)

def model(skips=False, out=4):
    from syncline.ddp import DistributedDataParallel
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, out), torch.nn.Linear(4, 4)
        def forward(self, x):
            return self.first(x) if skips else self.second(self.first(x))
    return DistributedDataParallel(Two())

"""

END = """
collectives.barrier()
collectives.destroy_process_group()
"""

# What each rank runs, and what the one that says all must say.
FAILURES = {
    "an exception on one rank": (
        "if rank == 1: raise ValueError('no such file: data-1.pt')",
        r"ValueError: no such file: data-1\.pt",
    ),
    "other calls": (
        "collectives.broadcast(ones, src=0) if rank == 2 else collectives.all_reduce(ones)",
        r"DisagreementError: .*make every rank issue the same ones\n  ranks 0, 1, 3: all_reduce.*\n  rank 2: broadcast",
    ),
    "another shape": (
        "collectives.all_reduce(torch.ones(5 if rank == 3 else 4))",
        r"DisagreementError: .*\n  ranks 0, 1, 2: all_reduce\(float32\[4\].*\n  rank 3: all_reduce\(float32\[5\]",
    ),
    "a rank that ends early": (
        "if rank == 1: sys.exit(0)",
        r"RankLostError: .*rank\(s\) 1 of the job left without taking part",
    ),
    "a stopped rank": (
        """
group.set_timeout(3)  # not before, because the start of a rank may take longer
if rank == 1:
    subprocess.Popen(["sh", "-c", f"sleep 40; kill -KILL {os.getpid()}"])  # whatever the launcher does
    os.kill(os.getpid(), signal.SIGSTOP)
collectives.all_reduce(ones)
""",
        r"CollectiveTimeout: .*rank\(s\) 1 \(pid \d+ on .*\) stands still, stopped by a signal; let it go on",
    ),
    "an unused parameter": (
        "net = model(skips=rank == 1); net(torch.ones(2, 4)).sum().backward()",
        r"MisuseError: backward ended on rank 1 of 4.*got no gradient in it: 'second\.weight', 'second\.bias'\. Freeze them",
    ),
    "another model": (
        "model(out=5 if rank == 1 else 4)",
        r"DisagreementError: .*build the same model on every rank\n  parameter 'first\.weight' is .* on rank 0 and .* rank 1",
    ),
}
# MPICH's mpiexec ends the job at once, and says so.
KILLED = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)"


def check(output: str, words: str) -> None:
    """One rank says all, with these words; the others one line each; no frames of Syncline and torch; nothing twice."""
    lines = [line for line in output.splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES, output
    assert output.count(FULL) == 1, output
    assert re.search(words, output), output
    assert "site-packages" not in output, output
    assert "/src/syncline/" not in output, output
    sentences = [line for line in lines if not re.match(r"\[syncline\]|Abort\(", line)]
    assert len(sentences) == len(set(sentences)), output
    speaker = re.search(r"\[syncline\] rank (\d) of 4 .* failed[^,]*:\n", output)
    assert speaker is not None, output
    followers = re.findall(r"\[syncline\] rank (\d) of 4 .*failed, too, .*; rank (\d) failed first", output)
    assert all(first == speaker[1] and follower != first for follower, first in followers), output
    (headline,) = re.findall(r"^(?:[\w.]+\.)?\w+Error: (.*)|^(?:[\w.]+\.)?CollectiveTimeout: (.*)", output, re.MULTILINE)
    assert len("".join(headline)) <= MOST_CHARACTERS, output


@pytest.mark.parametrize("what", list(FAILURES))
def test_one_failure_over_mpi(run_job: Callable[..., Any], what: str) -> None:
    program, words = FAILURES[what]
    job = run_job(4, "", "-c", f"{BEGIN}{program}{END}")
    assert job.status != 0
    check(job.output, words)


def test_a_killed_rank_over_mpi(run_job: Callable[..., Any]) -> None:
    job = run_job(4, "", "-c", f"{BEGIN}{KILLED}{END}")
    assert job.status != 0
    assert len(job.output.splitlines()) <= MOST_LINES, job.output
    assert job.output.count(FULL) <= 1, job.output


@pytest.mark.parametrize("what", ["an exception on one rank", "an unused parameter", "another model"])
def test_one_failure_under_torchrun(run_job: Callable[..., Any], tmp_path: Path, what: str) -> None:
    """What the ranks print; torchrun adds its own summary."""
    program, words = FAILURES[what]
    (tmp_path / "train.py").write_text(f"{BEGIN}{program}{END}")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "4", "--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    job = run_job(None, "", *torchrun, str(tmp_path / "train.py"), SYNCLINE_BACKEND="gloo")
    assert job.status != 0
    logs = sorted((tmp_path / "logs").rglob("std*.log"))
    assert len(logs) == 8, logs
    check("".join(path.read_text() for path in logs), words)


def test_a_setting_brings_the_frames_back(run_job: Callable[..., Any]) -> None:
    program, _ = FAILURES["other calls"]
    job = run_job(2, "", "-c", f"{BEGIN}{program.replace('== 2', '== 1')}{END}", SYNCLINE_FULL_TRACEBACKS="1")
    assert job.output.count(FULL) == 1, job.output
    assert "/src/syncline/" in job.output or f"site-packages{'/'}syncline" in job.output, job.output
