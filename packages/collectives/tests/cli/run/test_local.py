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


def test_ranks_are_ended_if_there_is_no_process_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[subprocess.Popen[bytes]]()

    class OneProcess(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            if started:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            super().__init__(*words, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", OneProcess)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(local, "find_spec", lambda name: None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with pytest.raises(LaunchError, match=r"rank 1 of 3: \[Errno 11\].*Start fewer ranks"):
            local.start_ranks(3)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert started[0].wait(100) == -signal.SIGKILL
