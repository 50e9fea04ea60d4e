"""The command `report` calls every reader that finds files of its kind in the folder."""

from __future__ import annotations

import argparse
import html
from collections.abc import Sequence
from pathlib import Path

from ...errors import InvalidArgumentError
from .reader import ReportReader, html_of, load_readers

HELP = "show the traces and failure reports in a folder"

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>syncline report: {title}</title>
<style>body {{ font-family: sans-serif; margin: 1em 2em; }} table {{ border-collapse: collapse; }}
td, th {{ padding: 0.2em 0.8em; border-bottom: 1px solid #ddd; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }}</style>
</head>
<body>
{body}
</body>
</html>
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder, the file of the page, and the options of the readers."""
    parser.add_argument("folder", type=Path, help="the folder that SYNCLINE_TRACE or an error names")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write an HTML page, complete in one file")
    for reader in load_readers():
        reader.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the reports of the folder, and write the page.

    Raises:
        InvalidArgumentError: there is no such folder, or no reader knows a file in it, or the page cannot be written.
    """
    readers = _readers_of(arguments.folder, load_readers())
    print("\n\n".join(reader.text(arguments.folder, arguments) for reader in readers))
    if arguments.html is not None:
        body = "\n".join(html_of(reader, arguments.folder, arguments) for reader in readers)
        _write(arguments.html, _PAGE.format(title=html.escape(arguments.folder.resolve().name), body=body))
        print(f"\nwrote {arguments.html}")
    return 0


def _readers_of(folder: Path, readers: Sequence[ReportReader]) -> list[ReportReader]:
    if not folder.is_dir():
        raise InvalidArgumentError(f"expected a folder, found no such folder: {folder}")
    found = [reader for reader in readers if reader.is_in(folder)]
    if not found:
        expected = "; ".join(reader.EXPECTED for reader in readers) or "a reader: none is installed"
        raise InvalidArgumentError(f"found nothing to report in {folder}; expected {expected}")
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write the page {path}: {error.strerror}") from error
