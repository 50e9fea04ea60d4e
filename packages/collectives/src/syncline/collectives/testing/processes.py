"""Run the ranks of a test as processes, without a launcher such as mpirun."""

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
    """Run `python SCRIPT RANK WORLD_SIZE FOLDER` for every rank, and wait for all ranks.

    The first call starts a server process, which loads torch once. The ranks are forks of this server. So changes of the
    variables PYTHON*, OMP_* and MKL_* after the first call have no effect. All ranks use the same seed for `hash`.

    Args:
        script: the script that each rank runs. `sys.path` begins with the script's folder, followed by the caller's entries.
        world_size: the number of ranks.
        folder: a folder in which the ranks can meet (`init_method="file://FOLDER"`) and write results. Rank R's output is in
            its file `output-R`.
        timeout_s: time limit of the whole run, in seconds. At the limit, the ranks print the stacks of their threads and are
            killed, and this function prints their output.
        killed: the ranks that a signal must kill. All other ranks must exit with status 0.
        preload: modules that the server imports before it forks the ranks, also for later calls.

    Raises:
        AssertionError: a rank or the server did not end as expected. The message says which.
        subprocess.TimeoutExpired: the ranks reached the time limit.
    """
    # Absolute, because the server has another current directory.
    outputs = [(folder / f"output-{rank}").absolute() for rank in range(world_size)]
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
        _server.kill()  # ends also the processes that the ranks started
        print(_said(outputs), flush=True)
        raise subprocess.TimeoutExpired(str(script), timeout_s)
    statuses = answer["statuses"]
    if any((status >= 0) if rank in killed else (status != 0) for rank, status in enumerate(statuses)):
        raise AssertionError(f"the ranks ended with {statuses}\n{_said(outputs)}")


class _RankServer:
    """The server process, which forks ranks. `run` starts the server if there is none.

    Only one thread at a time can call `run`. If an error interrupts `run`, the server and its ranks are killed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Send a job to the server, and return the server's answer. `rank_server` describes jobs and answers.

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
                with suppress(BrokenPipeError):  # the server has ended, so `readline` below returns an empty text
                    process.stdin.write(json.dumps(job) + "\n")
                    process.stdin.flush()
                if line := process.stdout.readline():
                    return dict(json.loads(line))
                raise AssertionError(f"the process that forks ranks ended, with status {process.wait(_EXIT_S)}")
            except BaseException:
                self.kill()
                raise

    def kill(self) -> None:
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
    environ["OPENBLAS_NUM_THREADS"] = "1"  # otherwise numpy's library starts threads on loading, and a fork loses these threads
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
