"""Ranks as processes of their own, without a launcher: for jobs that find one another through a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_processes(script: Path, world_size: int, folder: Path, *, timeout_s: float = 100.0) -> None:
    """Start `python SCRIPT RANK WORLD_SIZE FOLDER` for every rank, and wait for all.

    Args:
        script: what each rank runs.
        world_size: how many ranks.
        folder: where they may meet, and leave what they found.
        timeout_s: seconds that one rank may take; the ranks still running then are killed.

    Raises:
        AssertionError: a rank ended with another status than 0; the message is all that the ranks printed.
        subprocess.TimeoutExpired: a rank took too long.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world_size), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if [rank.returncode for rank in ranks] != [0] * world_size:
        raise AssertionError("\n".join(said))
