"""Ranks as processes of their own, without a launcher: for jobs that find one another through a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

_STACKS_S = 5.0


def run_processes(
    script: Path, world_size: int, folder: Path, *, timeout_s: float = 100.0, killed: frozenset[int] = frozenset()
) -> None:
    """Start `python SCRIPT RANK WORLD_SIZE FOLDER` for every rank, and wait for all. They import from where this process does.

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
    with ExitStack() as opened:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(world_size), str(folder)],
                stdout=opened.enter_context(output.open("w")),
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONFAULTHANDLER": "1"},
            )
            for rank, output in enumerate(outputs)
        ]
        end_s = time.monotonic() + timeout_s
        try:
            statuses = [rank.wait(max(0.0, end_s - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            _tell_stacks(ranks)
            print(_said(outputs), flush=True)
            raise
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if any((status >= 0) if rank in killed else (status != 0) for rank, status in enumerate(statuses)):
        raise AssertionError(f"the ranks ended with {statuses}\n{_said(outputs)}")


def _tell_stacks(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End those that run, by the signal at which Python's fault handler prints the stack of every thread."""
    for rank in ranks:
        rank.send_signal(signal.SIGABRT)
    for rank in ranks:
        try:
            rank.wait(_STACKS_S)
        except subprocess.TimeoutExpired:
            pass  # it is killed


def _said(outputs: list[Path]) -> str:
    return "\n".join(f"--- rank {rank} ---\n{output.read_text(errors='replace')}" for rank, output in enumerate(outputs))
