"""The status with which a program ends, as it is known at its end."""

from __future__ import annotations

import subprocess

import pytest

from test_support.jobs import LIMIT_S

PROGRAM = """
import atexit, sys
from syncline.collectives.health.exit_status import exit_status, watch_exit_status
atexit.register(lambda: print("status", exit_status()))
watch_exit_status()
watch_exit_status()
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(7)", 7),
        ("exit(7)", 7),
        ("quit(7)", 7),
        ("exit()", 0),
        ("sys.exit('words')", 1),
        ("try: exit(7)\nexcept SystemExit: pass", 0),
        ("", 0),
    ],
)
def test_the_status_of_every_way_out(end: str, status: int, python: list[str]) -> None:
    done = subprocess.run([*python, "-c", f"{PROGRAM}\n{end}"], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout.strip()) == (status, f"status {status}"), done.stderr
