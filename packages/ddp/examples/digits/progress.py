"""A progress bar, on the one rank that shows it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 2.0


class _Lines:
    """A stream on which a bar that is drawn anew becomes a new line.

    mpiexec and srun connect ranks to pipes, and logs are files: there, a bar that returns to the start of its line is one long
    line of rubbish.
    """

    encoding = "ascii"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write what tqdm has to say, without its returns and line ends, as a line of its own."""
        if line := text.strip("\r\n "):
            self._stream.write(f"{line}\n")

    def flush(self) -> None:
        """Hand it on."""
        self._stream.flush()


def epochs_with_progress(epochs: int, *, is_shown: bool) -> Iterable[int]:
    """Count epochs from 0, and show on stderr how far it has got: as a bar in a terminal, else as a line now and then."""
    if not is_shown:
        return range(epochs)
    if sys.stderr.isatty():
        bar: Iterable[int] = tqdm(range(epochs), desc="training", unit=" epoch")
    else:
        bar = tqdm(
            range(epochs), desc="training", unit=" epoch", file=_Lines(sys.stderr), mininterval=SECONDS_BETWEEN_LINES, ncols=80
        )
    return bar
