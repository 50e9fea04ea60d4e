"""Shows, for `syncline report FOLDER`, what the ranks of a job wrote when something failed."""

from __future__ import annotations

import argparse
from pathlib import Path

from .job_report import merged, read_reports

EXPECTED = "files rank-*.json (what ranks wrote when something failed), there or in syncline-report-*"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whether stacks are shown."""
    parser.add_argument(
        "--stacks", type=int, metavar="RANK", help="of a failure, show the stacks of this rank's threads as well"
    )


def is_in(folder: Path) -> bool:
    """Whether ranks wrote something there."""
    return bool(_folders(folder))


def text(folder: Path, arguments: argparse.Namespace) -> str:
    """The reports of all ranks, merged; one after the other if jobs failed several times.

    Raises:
        InvalidArgumentError: a file is no report.
    """
    return "\n\n".join(_text(one, arguments.stacks) for one in _folders(folder))


def _folders(folder: Path) -> list[Path]:
    """The folder, and those in it that `SYNCLINE_REPORT_DIR` would have made."""
    return [one for one in (folder, *sorted(folder.glob("syncline-report-*"))) if any(one.glob("rank-*.json"))]


def _text(folder: Path, stacks_of: int | None) -> str:
    reports = read_reports(folder)
    shown = [merged(reports)]
    for report in reports:
        if report.rank == stacks_of:
            shown.append(f"the threads of rank {report.rank}, which reported because of: {report.reason}\n{report.stacks}")
    return "\n\n".join(shown)
