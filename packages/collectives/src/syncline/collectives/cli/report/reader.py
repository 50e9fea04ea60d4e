"""ReportReader: what shows one kind of files in a folder of a job."""

from __future__ import annotations

import argparse
import html
from pathlib import Path
from typing import Protocol, cast

from ...plugins import load_plugin, plugin_names

ENTRY_POINT_GROUP = "syncline.report_readers"


class ReportReader(Protocol):
    """What a name in the group `syncline.report_readers` stands for: an object or a module.

    It may also have `html(folder, arguments) -> str`, a fragment of a page that takes the place of its text there.

    Attributes:
        EXPECTED: the files that it looks for, in words, such as "failure records (rank-*.json)".
    """

    EXPECTED: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Its options of `syncline report`, all of which can be left out."""

    def is_in(self, folder: Path) -> bool:
        """Whether the folder has such files."""

    def text(self, folder: Path, arguments: argparse.Namespace) -> str:
        """What the terminal shows.

        Raises:
            InvalidArgumentError: a file cannot be read.
        """


def load_readers() -> list[ReportReader]:
    """All that are installed, by the order of their names."""
    return [
        cast(ReportReader, load_plugin(ENTRY_POINT_GROUP, name, ("EXPECTED", "add_arguments", "is_in", "text")))
        for name in plugin_names(ENTRY_POINT_GROUP)
    ]


def html_of(reader: ReportReader, folder: Path, arguments: argparse.Namespace) -> str:
    """Its part of a page: its own, or its text."""
    own = getattr(reader, "html", None)
    return own(folder, arguments) if own is not None else f"<pre>{html.escape(reader.text(folder, arguments))}</pre>"
