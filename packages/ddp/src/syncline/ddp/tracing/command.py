"""The command `trace` merges the traces of all ranks into one file for ui.perfetto.dev."""

from __future__ import annotations

import argparse
from pathlib import Path

from syncline.collectives import InvalidArgumentError

from .trace_file import TRACE_NAME, write_trace

HELP = "merge the traces of all ranks (SYNCLINE_TRACE=FOLDER) into one file for ui.perfetto.dev"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options: the folder of the traces, the merged file, and the profiles of torch.profiler to merge."""
    parser.add_argument("folder", type=Path, help="the folder that SYNCLINE_TRACE names; it must hold the files of all ranks")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"the merged file (default: {TRACE_NAME} in the folder)")
    parser.add_argument(
        "--profile",
        action="append",
        default=[],
        metavar="RANK=FILE",
        help="also merge the file that torch.profiler exported on this rank; can be given several times",
    )


def run(arguments: argparse.Namespace) -> int:
    """Merge the traces, and print the path of the merged file."""
    profiles: dict[int, Path] = {}
    for rank, path in map(_profile, arguments.profile):
        if rank in profiles:
            raise InvalidArgumentError(
                f"--profile: expected one file for each rank, found {profiles[rank]} and {path} for rank {rank}; give one"
            )
        profiles[rank] = path
    merged = write_trace(arguments.folder, arguments.output, profiles)
    print(f"wrote {merged}; open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


def _profile(text: str) -> tuple[int, Path]:
    rank, _, path = text.partition("=")
    if not rank.isdecimal() or not path:
        raise InvalidArgumentError(f"--profile: expected RANK=FILE, such as 0=profile.json, found {text!r}")
    return int(rank), Path(path)
