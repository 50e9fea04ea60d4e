"""Jobs that tests start: each rank prints into a file of its own.

A launcher passes on what it has read so far, which may be half a line. Then text of the next rank would stand in its middle.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from . import rank_log


@dataclass(frozen=True)
class Finished:
    """The result of a job: the exit status, and its output: first the launcher's, then each rank's."""

    status: int
    output: str


# A job takes some seconds on free cores, and fifteen times as long on busy ones. Only one that hangs takes longer than this.
LIMIT_S = 180.0


def mpiexec_of_tests() -> list[str]:
    """The mpiexec with its options: SYNCLINE_TEST_MPIEXEC, by default the mpiexec next to this Python. It may not exist."""
    return shlex.split(os.environ.get("SYNCLINE_TEST_MPIEXEC", str(Path(sys.executable).parent / "mpiexec")))


def skip_without_mpiexec(mpiexec: Sequence[str]) -> None:
    """Skip the test if there is no such mpiexec."""
    if not Path(mpiexec[0]).exists():
        pytest.skip(f"there is no {mpiexec[0]}; install the extra [mpich], or set SYNCLINE_TEST_MPIEXEC")


@contextmanager
def ranks_logs(python: Sequence[str]) -> Iterator[tuple[list[str], Path]]:
    """The command in place of `python` (a command that begins with this Python) on each rank, and the folder of the output."""
    with tempfile.TemporaryDirectory(prefix="syncline-job-") as folder:
        yield [sys.executable, "-I", "-S", rank_log.__file__, folder, *python[1:]], Path(folder)


def finished(
    command: Sequence[str], folder: Path, timeout_s: float, variables: Mapping[str, str], logs: Path | None = None
) -> Finished:
    """Run a job to its end, as `run_within`. Fails the test at the time limit."""
    job, is_late = run_within(command, folder, timeout_s, variables, logs)
    if is_late:
        pytest.fail(f"the job did not end within {timeout_s:g} s; until then it printed:\n{job.output}")
    return job


def run_within(
    command: Sequence[str], folder: Path, timeout_s: float, variables: Mapping[str, str], logs: Path | None = None
) -> tuple[Finished, bool]:
    """Run a job in `folder`, with more variables than this process's.

    Returns:
        The result, and whether the job was ended because it had not ended in time.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    is_late = False
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        is_late = True
        process.terminate()  # mpiexec passes it on to the ranks
        output, _ = process.communicate(timeout=60)
    output = "".join([output, *(rank_log.read(logs) if logs else {}).values()])
    return Finished(process.returncode, output), is_late
