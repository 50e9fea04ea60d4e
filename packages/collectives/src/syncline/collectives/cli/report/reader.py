"""ReportReader: shows one kind of file that a job left in a folder."""

from __future__ import annotations

import argparse
import html
from pathlib import Path
from typing import Protocol, cast

from ...plugins import load_plugin, plugin_names

ENTRY_POINT_GROUP = "syncline.report_readers"


class ReportReader(Protocol):
    """An object or a module that an entry point in the group `syncline.report_readers` names.

    A reader may also have `html(folder, arguments) -> str`. `html` returns the reader's part of the HTML page. If the reader
    has no `html`, the page shows the reader's text.

    Attributes:
        EXPECTED: the files that the reader looks for, in words, such as "failure records (rank-*.json)".
    """

    EXPECTED: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the reader's own options to `syncline report`. All these options must be optional."""

    def is_in(self, folder: Path) -> bool:
        """Whether the folder has files of this kind."""

    def text(self, folder: Path, arguments: argparse.Namespace) -> str:
        """Return the text for the terminal.

        Raises:
            InvalidArgumentError: a file cannot be read.
        """


def load_readers() -> list[ReportReader]:
    """Load all installed readers, in the order of their names."""
    return [
        cast(ReportReader, load_plugin(ENTRY_POINT_GROUP, name, ("EXPECTED", "add_arguments", "is_in", "text")))
        for name in plugin_names(ENTRY_POINT_GROUP)
    ]


def html_of(reader: ReportReader, folder: Path, arguments: argparse.Namespace) -> str:
    """Return the reader's part of the page: its own HTML, or else its text."""
    own = getattr(reader, "html", None)
    return own(folder, arguments) if own is not None else f"<pre>{html.escape(reader.text(folder, arguments))}</pre>"
