"""Ranks as child processes of `syncline run`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from syncline.collectives.cli.run import local
from syncline.collectives.errors import LaunchError
from test_support.jobs import LIMIT_S

SIGNALLED = """
import os, signal, subprocess, sys
from syncline.collectives.cli.run import local

class SignalledAfterStart(subprocess.Popen):
    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = SignalledAfterStart
sys.orig_argv = [sys.executable, "-c", "import time; time.sleep(600)"]
local.find_spec = lambda name: None
sys.exit(local.start_ranks(2))
"""


def test_a_signal_while_the_ranks_are_started_reaches_all_of_them(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with started.open("w") as output:
        done = subprocess.run([sys.executable, "-c", SIGNALLED], stdout=output, timeout=LIMIT_S)
    pids = [int(pid) for pid in started.read_text().split()]
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (done.returncode, len(pids), left) == (128 + signal.SIGTERM, 2, [])


INTERRUPTED = """
import os, signal, subprocess, sys
from syncline.collectives.cli.run import local

class InterruptedBeforeExec(subprocess.Popen):
    def __init__(self, *words, preexec_fn, **options):
        def interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            preexec_fn()
        super().__init__(*words, preexec_fn=interrupt, **options)

subprocess.Popen = InterruptedBeforeExec
sys.orig_argv = [sys.executable, "-c", "import time; time.sleep(600)"]
local.find_spec = lambda name: None
sys.exit(local.start_ranks(2))
"""


def test_ctrl_c_in_a_rank_that_starts_is_no_failed_start() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert "cannot start" not in done.stderr


def started(program: str, rank_program: str) -> subprocess.CompletedProcess[str]:
    """Start two ranks without MPI, in a process that begins with `program`. Each rank runs `rank_program`."""
    begin = f"""{program}
import os, signal, sys
from syncline.collectives.cli.run import local
sys.orig_argv = [sys.executable, "-c", {rank_program!r}]
local.find_spec = lambda name: None
sys.exit(local.start_ranks(2))
"""
    return subprocess.run([sys.executable, "-c", begin], capture_output=True, text=True, timeout=LIMIT_S)


FAILING = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {}
time.sleep(600)
"""


def test_a_signal_without_a_name_is_told() -> None:
    done = started("", FAILING.format("os.kill(os.getpid(), signal.SIGRTMIN + 6)"))
    number = int(signal.SIGRTMIN) + 6
    assert done.returncode == 128 + number, done.stderr
    assert f"was ended by signal {number} (Real-time signal 6); the other ranks are ended" in done.stderr


def test_all_ranks_are_ended_although_nobody_reads_the_errors() -> None:
    done = started(
        "import os; reading, writing = os.pipe(); os.dup2(writing, 2); os.close(reading)", FAILING.format("sys.exit(3)")
    )
    assert done.returncode == 3


def test_the_status_is_known_although_the_caller_ignores_children() -> None:
    ignoring = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    done = started(ignoring, FAILING.format("sys.exit(3)"))
    assert done.returncode == 3, done.stderr


def test_a_failure_is_told_after_a_signal_that_all_ignore() -> None:
    under_nohup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    done = started(under_nohup, FAILING.format("os.kill(os.getppid(), signal.SIGHUP); sys.exit(3)"))
    assert done.returncode == 3
    assert "exited with status 3; the other ranks are ended" in done.stderr


def test_an_argument_that_mpiexec_takes_for_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_mpiexec", lambda: "/mpi/mpiexec")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "syncline", "run", "-n", "2", "train.py", "--separator", ":"])
    with pytest.raises(LaunchError, match="the argument ':' cannot be passed on"):
        local.start_ranks(2)


def test_ranks_are_ended_if_there_is_no_process_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[subprocess.Popen[bytes]]()

    class OneProcess(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            if made:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            super().__init__(*words, **options)
            made.append(self)

    monkeypatch.setattr(subprocess, "Popen", OneProcess)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(local, "find_spec", lambda name: None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with pytest.raises(LaunchError, match=r"rank 1 of 3: \[Errno 11\].*Start fewer ranks"):
            local.start_ranks(3)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert made[0].returncode == -signal.SIGKILL
