"""The program that puts the rank before each line of output."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from syncline.collectives.cli.run import output
from test_support.jobs import LIMIT_S

SOON_S = 30


@contextmanager
def tagged() -> Iterator[tuple[int, int]]:
    """The file descriptors of an output that is tagged: where a rank writes, and where the text comes out."""
    source, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(output.__file__), "[1] ", str(source)], pass_fds=[source], stdout=subprocess.PIPE
    ) as program:
        os.close(source)
        assert program.stdout is not None
        with os.fdopen(writing, "wb", buffering=0) as file:
            yield file.fileno(), program.stdout.fileno()


def comes_out(reading: int, expected: bytes) -> None:
    found = b""
    while len(found) < len(expected):
        assert select.select([reading], [], [], SOON_S)[0], f"only {found!r} came, not {expected!r}"
        found += os.read(reading, len(expected) - len(found))
    assert found == expected


def test_a_progress_bar_comes_out_step_by_step() -> None:
    with tagged() as (writing, reading):
        os.write(writing, b"\rstep 0")
        for step in range(3):
            os.write(writing, b"\rstep %d" % (step + 1))
            comes_out(reading, b"[1] step %d\r" % step)
        os.write(writing, b"\ndone\n")
        comes_out(reading, b"[1] step 3\n[1] done\n")


@pytest.mark.parametrize("pieces", [[b"a\r\nb\r\n"], [b"a\r", b"\nb", b"\r", b"\n"]])
def test_a_carriage_return_before_a_newline_ends_no_line(pieces: list[bytes]) -> None:
    with tagged() as (writing, reading):
        os.write(writing, b"first\n")
        comes_out(reading, b"[1] first\n")
        for piece in pieces:
            os.write(writing, piece)
            # Let the program read the piece alone, if it has not come out already.
            select.select([reading], [], [], 0.05)
        comes_out(reading, b"[1] a\r\n[1] b\r\n")
        os.write(writing, b"\n\nlast\n")
        comes_out(reading, b"[1] \n[1] \n[1] last\n")


FORKING = """
import os
from syncline.collectives.cli.run.output import tag_lines
tag_lines(1)
if os.fork() == 0:
    os._exit(0)
os.wait()
try:
    os.wait()
except ChildProcessError:
    print("no other child")
"""


def test_the_program_is_no_child_of_the_rank() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "[1] no other child\n", done.stderr


CLOSED = """
import os, sys
from syncline.collectives.cli.run.output import tag_lines
tag_lines(1)
print("nobody reads this")
os.system("echo and this")
print("an error", file=sys.stderr)
"""


def test_a_closed_output_stays_empty_and_the_other_is_tagged() -> None:
    words = ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, CLOSED]
    done = subprocess.run(words, stderr=subprocess.PIPE, timeout=LIMIT_S, check=True)
    assert done.stderr == b"[1] an error\n"
