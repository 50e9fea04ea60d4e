"""Show the traced steps of all ranks, for `syncline report FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import page
from .floor import read_floor
from .part import PATTERN
from .table import tables
from .trace_file import read_timeline

EXPECTED = f"files {PATTERN} (steps that ranks traced, by SYNCLINE_TRACE)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `syncline report` for traces."""
    parser.add_argument(
        "--floor",
        type=Path,
        metavar="BENCH.json",
        help="compare the bandwidth of a trace with a file of `syncline bench --backends floor --json`",
    )


def is_in(folder: Path) -> bool:
    """Whether the folder has files of traced steps."""
    return any(folder.glob(PATTERN))


def text(folder: Path, arguments: argparse.Namespace) -> str:
    """Return tables of the ranks and the steps."""
    timeline = read_timeline(folder)
    return tables(timeline, None if arguments.floor is None else read_floor(arguments.floor, timeline.size))


def html(folder: Path, arguments: argparse.Namespace) -> str:
    """Return plots and tables as HTML."""
    del arguments
    return page.fragment(read_timeline(folder))
