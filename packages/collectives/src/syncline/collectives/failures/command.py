"""`syncline report FOLDER`: merge what the ranks of a job have written."""

from __future__ import annotations

import argparse
from pathlib import Path

from .job_report import merged, read_reports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folder, and whether stacks are shown."""
    parser.add_argument("folder", type=Path, help="the folder that the error named (syncline-report-...)")
    parser.add_argument("--stacks", type=int, metavar="RANK", help="show the stacks of this rank's threads as well")


def run(arguments: argparse.Namespace) -> int:
    """Print the merged report.

    Raises:
        InvalidArgumentError: the folder holds no reports.
    """
    reports = read_reports(arguments.folder)
    print(merged(reports))
    for report in reports:
        if report.rank == arguments.stacks:
            print(f"\nthe threads of rank {report.rank}, which reported because of: {report.reason}\n{report.stacks}")
    return 0
