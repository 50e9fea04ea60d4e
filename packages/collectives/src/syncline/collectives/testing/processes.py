"""Ranks as processes of their own, without a launcher: for jobs that find one another through a file."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_SERVER = Path(__file__).with_name("rank_server.py")


def run_processes(
    script: Path, world_size: int, folder: Path, *, timeout_s: float = 100.0, killed: frozenset[int] = frozenset()
) -> None:
    """Run `python SCRIPT RANK WORLD_SIZE FOLDER` for every rank, and wait for all. They import from where this process does.

    They are forks of a process that has loaded torch and done nothing else, which the first call starts (`rank_server`).

    Args:
        script: what each rank runs.
        world_size: how many ranks.
        folder: where they may meet, and leave what they found. What rank r prints is there in `output-r`.
        timeout_s: seconds that all may take together; the ranks still running then are killed, and what they printed is shown,
            with where each of their threads was.
        killed: ranks that are to die of a signal.

    Raises:
        AssertionError: a rank ended otherwise than expected; the message is all that the ranks printed.
        subprocess.TimeoutExpired: they took too long.
    """
    outputs = [folder / f"output-{rank}" for rank in range(world_size)]
    job = {
        "script": str(script),
        "world_size": world_size,
        "folder": str(folder),
        "outputs": [str(output) for output in outputs],
        "timeout_s": timeout_s,
        "environ": dict(os.environ),
        "path": [path for path in sys.path if path],
        "cwd": os.getcwd(),
    }
    answer = _answer(job)
    if answer["timed_out"]:
        print(_said(outputs), flush=True)
        raise subprocess.TimeoutExpired(str(script), timeout_s)
    statuses = answer["statuses"]
    if any((status >= 0) if rank in killed else (status != 0) for rank, status in enumerate(statuses)):
        raise AssertionError(f"the ranks ended with {statuses}\n{_said(outputs)}")


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    """Have the server run a job. Answers to jobs that somebody has stopped waiting for, by a signal, are passed over."""
    server, number = _server(), next(_numbers)
    assert server.stdin is not None
    server.stdin.write(json.dumps({**job, "number": number}) + "\n")
    server.stdin.flush()
    for line in server.stdout or ():
        answer: dict[str, Any] = json.loads(line)
        if answer["number"] == number:
            return answer
    raise AssertionError(f"the process that forks ranks ended, with status {server.wait()}")


_numbers = itertools.count()


@functools.cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, for that closes its input."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's library starts its threads when it is loaded, and a fork would lose them
    server = subprocess.Popen(
        [sys.executable, str(_SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )
    atexit.register(server.communicate)
    return server


def _said(outputs: list[Path]) -> str:
    return "\n".join(f"--- rank {rank} ---\n{output.read_text(errors='replace')}" for rank, output in enumerate(outputs))
