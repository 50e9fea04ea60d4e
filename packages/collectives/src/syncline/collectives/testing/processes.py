"""Ranks as processes of their own, without a launcher: for jobs that find one another through a file."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_SERVER = Path(__file__).with_name("rank_server.py")
_EXIT_S = 10.0


def run_processes(
    script: Path,
    world_size: int,
    folder: Path,
    *,
    timeout_s: float = 100.0,
    killed: frozenset[int] = frozenset(),
    preload: Sequence[str] = (),
) -> None:
    """Run `python SCRIPT RANK WORLD_SIZE FOLDER` for every rank, and wait for all. They import from where this process does.

    They are forks of a process that has loaded torch and done nothing else, which the first call starts (`rank_server`). So
    what Python and torch read of the environment when they start (PYTHON*, OMP_*, MKL_*) is that of the first call, and ranks
    share the seed of `hash`: a program that depends on the order of a set of strings shows it only under a launcher.

    Args:
        script: what each rank runs.
        world_size: how many ranks.
        folder: where they may meet, and leave what they found. What rank r prints is there in `output-r`.
        timeout_s: seconds that all may take together; the ranks still running then are killed, and what they printed is shown,
            with where each of their threads was.
        killed: ranks that are to die of a signal.
        preload: modules that the process they are forked from loads before, and keeps. Torch's optimizers, for example, load
            `torch._dynamo` when the first one is made: more than a second for each rank.

    Raises:
        AssertionError: a rank ended otherwise than expected; the message is all that the ranks printed.
        subprocess.TimeoutExpired: they took too long.
    """
    outputs = [folder / f"output-{rank}" for rank in range(world_size)]
    job = {
        "script": str(script),
        "world_size": world_size,
        "preload": list(preload),
        "folder": str(folder),
        "outputs": [str(output) for output in outputs],
        "timeout_s": timeout_s,
        "environ": dict(os.environ),
        "path": [path for path in sys.path if path],
        "cwd": os.getcwd(),
    }
    answer = _server.run(job)
    if answer["timed_out"]:
        _server.kill()  # and what the ranks have started
        print(_said(outputs), flush=True)
        raise subprocess.TimeoutExpired(str(script), timeout_s)
    statuses = answer["statuses"]
    if any((status >= 0) if rank in killed else (status != 0) for rank, status in enumerate(statuses)):
        raise AssertionError(f"the ranks ended with {statuses}\n{_said(outputs)}")


class _RankServer:
    """The process that forks ranks, started when it is needed. It and all that comes of it is one group of processes.

    One thread at a time has a job run. Whoever stops waiting for one, by a signal, an error or its own end, ends the server
    with its ranks; a fork of this process leaves it alone.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer of `rank_server` to a job.

        Raises:
            AssertionError: the server ended.
        """
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self.kill()
                self._process, self._owner = _start(), os.getpid()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with suppress(BrokenPipeError):  # it says no word either
                    process.stdin.write(json.dumps(job) + "\n")
                    process.stdin.flush()
                if line := process.stdout.readline():
                    return dict(json.loads(line))
                raise AssertionError(f"the process that forks ranks ended, with status {process.wait(_EXIT_S)}")
            except BaseException:
                self.kill()
                raise

    def kill(self) -> None:
        """End the server and all ranks, at once."""
        with self._lock:
            process, self._process = self._process, None
            if process is None or self._owner != os.getpid():
                return
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in filter(None, (process.stdin, process.stdout)):
                with suppress(BrokenPipeError):
                    stream.close()


_server = _RankServer()
atexit.register(_server.kill)


def _start() -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's library starts its threads when it is loaded, and a fork would lose them
    return subprocess.Popen(
        [sys.executable, str(_SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
    )


def _said(outputs: list[Path]) -> str:
    return "\n".join(f"--- rank {rank} ---\n{_text(output)}" for rank, output in enumerate(outputs))


def _text(output: Path) -> str:
    return output.read_text(errors="replace") if output.exists() else "(it ended before it could print)"
