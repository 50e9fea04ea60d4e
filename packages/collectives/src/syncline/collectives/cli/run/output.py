"""Redirect the standard streams.

This file is also the program that puts the rank before each line of output. The program is a separate process, so it reads the
output of a rank and the rank's children to the end, even if the rank is killed.
"""

from __future__ import annotations

import os
import sys


def end_stdin() -> None:
    """Give this process and its children an empty standard input."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)


def silence_stdout() -> None:
    """Discard the standard output of this process and its children."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), sys.__stdout__.fileno() if sys.__stdout__ else 1)


def tag_lines(rank: int) -> None:
    """Put the rank before each line that this process or its children write."""
    import subprocess

    from ...startup.uncaught_errors import flush_output

    flush_output()
    # If a standard stream is closed, a pipe below would get the stream's number. So open the null device in its place.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free
    pipes = [os.pipe(), os.pipe()]
    # Run this file as a program that is no child of this rank, because a script may wait for all its children.
    subprocess.run(
        [sys.executable, "-I", "-S", __file__, f"[{rank}] ", *(str(reading) for reading, _ in pipes)],
        stdin=subprocess.DEVNULL,
        pass_fds=[reading for reading, _ in pipes],
        start_new_session=True,  # a signal to the job's process group must not end this program before the rank
        check=True,
    )
    for number, (reading, writing) in enumerate(pipes, start=1):
        os.dup2(writing, number)
        os.close(reading)
        os.close(writing)


def _filter(tag: bytes, sources: dict[int, int]) -> None:
    """Copy lines from each source to its target (file descriptors), with the tag before each line, until all sources end.

    A carriage return ends a line, too, because a progress bar may print no newline for hours. If the next byte is a newline,
    this newline ends the line.
    """
    import re
    import selectors

    ends = re.compile(rb"(\n|\r(?=[^\n]))")
    begun = dict.fromkeys(sources, b"")
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                found = os.read(key.fd, 1 << 16)
                *pieces, begun[key.fd] = ends.split(begun[key.fd] + found)
                lines = list(zip(pieces[::2], pieces[1::2], strict=True))
                if not found:
                    selector.unregister(key.fd)
                    lines = [(begun[key.fd], b"\n")] if begun[key.fd] else []
                # A progress bar begins with a carriage return. The empty text before it needs no tag.
                tagged = [tag + line + end for line, end in lines if line or end == b"\n"]
                try:
                    _write_all(sources[key.fd], b"".join(tagged))
                except OSError:
                    # The target's reader has ended, or the disk is full. Close the source, so that the rank gets an error at
                    # its next write.
                    if found:
                        selector.unregister(key.fd)
                    os.close(key.fd)


def _write_all(target: int, text: bytes) -> None:
    while text:
        text = text[os.write(target, text) :]


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    _filter(sys.argv[1].encode(), {int(source): target for target, source in enumerate(sys.argv[2:], start=1)})
