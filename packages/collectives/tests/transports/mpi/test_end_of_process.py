"""What ends a process that MPI does not let go."""

from __future__ import annotations

import signal
import subprocess

import pytest

from test_support.jobs import LIMIT_S

pytest.importorskip("mpi4py")

PROGRAM = """
import signal, time
import mpi4py
mpi4py.rc.initialize = False
from syncline.collectives.transports.mpi.job_abort import _end_within

signal.signal(signal.SIGALRM, signal.SIG_IGN)  # whatever the program did with it before
_end_within(0.2)
time.sleep(60)
"""


def test_a_process_that_does_not_end_in_time_is_ended_by_the_system(python: list[str]) -> None:
    ended = subprocess.run([*python, "-c", PROGRAM], capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == -signal.SIGALRM, ended.stderr
