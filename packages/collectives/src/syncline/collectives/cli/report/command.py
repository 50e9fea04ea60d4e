"""The command `report` shows the files in a folder with all installed readers (`ReportReader`)."""

from __future__ import annotations

import argparse
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from ...errors import InvalidArgumentError, SynclineError
from ...plugins import load_plugin, plugin_names

ENTRY_POINT_GROUP = "syncline.report_readers"


class ReportReader(Protocol):
    """Shows one kind of files in a folder. A package registers a reader as an entry point of `syncline.report_readers`.

    A reader is an object or a module. A reader may also have a function `html(folder, arguments) -> str`, which returns its
    part of the HTML page. Without this function, the page shows the reader's text.

    Attributes:
        EXPECTED: describes the files that the reader looks for, such as "failure records (rank-*.json)".
    """

    EXPECTED: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the reader's own options to `syncline report`.

        All these options must be optional. The option `--an-option` sets `an_option`. Its default equals that of another call.
        """

    def is_in(self, folder: Path) -> bool:
        """Return whether the folder has files that this reader can show."""

    def text(self, folder: Path, arguments: argparse.Namespace) -> str:
        """Return the content of the files, as text for the terminal.

        Raises:
            InvalidArgumentError: a file cannot be read.
        """


def load_readers() -> list[ReportReader]:
    """Load all installed readers, in the order of their names."""
    return [
        cast(ReportReader, load_plugin(ENTRY_POINT_GROUP, name, ("EXPECTED", "add_arguments", "is_in", "text")))
        for name in plugin_names(ENTRY_POINT_GROUP)
    ]


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
    """Add the arguments of the command: the folder, `--html`, and the readers' options."""
    parser.add_argument("folder", type=Path, help="the folder that SYNCLINE_TRACE or an error names")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write an HTML page, complete in one file")
    for reader in load_readers():
        reader.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the reports of the folder. With `--html`, also write them as an HTML page.

    If a reader fails, this function still prints and writes the other readers' reports. At the end, it raises the errors.

    Raises:
        InvalidArgumentError: the folder does not exist, no reader finds a file in the folder, an option is given for files
            that the folder does not have, a reader fails, or the page cannot be written.
    """
    failures: list[SynclineError] = []
    sections: list[str] = []
    before = ""
    for reader in _readers_of(arguments, load_readers()):
        try:
            text = reader.text(arguments.folder, arguments)
            print(before + text)
            before = "\n"
            if arguments.html is not None:
                own = getattr(reader, "html", None)
                sections.append(f"<pre>{html.escape(text)}</pre>" if own is None else own(arguments.folder, arguments))
        except SynclineError as error:
            failures.append(error)
    if sections:
        page = _PAGE.format(title=html.escape(arguments.folder.resolve().name), body="\n".join(sections))
        try:
            _write(arguments.html, page)
            print(f"\nwrote {arguments.html}")
        except SynclineError as error:
            failures.append(error)
    if failures:
        raise InvalidArgumentError("\n".join(map(str, failures))) from failures[0]
    return 0


def _readers_of(arguments: argparse.Namespace, readers: Sequence[ReportReader]) -> list[ReportReader]:
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise InvalidArgumentError(f"expected a folder, found no such folder: {folder}")
    found = [reader for reader in readers if reader.is_in(folder)]
    if not found:
        expected = "; ".join(reader.EXPECTED for reader in readers) or "a reader: none is installed"
        raise InvalidArgumentError(f"found nothing to report in {folder}; expected {expected}")
    for reader in readers:
        if reader not in found:
            _refuse_options_of(reader, arguments)
    return found


def _refuse_options_of(reader: ReportReader, arguments: argparse.Namespace) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    reader.add_arguments(parser)
    for name, default in vars(parser.parse_args([])).items():
        if getattr(arguments, name) != default:
            option = "--" + name.replace("_", "-")
            raise InvalidArgumentError(f"{option}: expected {reader.EXPECTED}, found none in {arguments.folder}")


def _write(path: Path, text: str) -> None:
    try:
        # If a file's name is not UTF-8, Python's text of the name has characters that UTF-8 cannot encode.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write the page {path}: {error.strerror}") from error
