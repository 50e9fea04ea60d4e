"""The pictures of docs/figures.md are drawn from its tables."""

from __future__ import annotations

from html import unescape
from pathlib import Path

import pytest

from benchmarks import figures_page

PAGE = (figures_page.DOCS / "figures.md").read_text()
SMALL = """
## Sizes

Words.

| Size | ours | theirs |
|---|---|---|
| 1 KiB | 2 | 30.5 |
| 4 MiB | 5 | 60 |
"""


def test_a_table_is_read_below_its_heading() -> None:
    sizes, times = figures_page.times_us(figures_page.table_below(SMALL, "Sizes"))
    assert sizes == [1024, 4 * 1024**2]
    assert times == {"ours": [2, 5], "theirs": [30.5, 60]}


def test_a_heading_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="'Speeds'"):
        figures_page.table_below(SMALL, "Speeds")


def test_the_page_fits_on_150_lines() -> None:
    assert len(PAGE.splitlines()) <= 150


def test_the_picture_is_that_of_the_tables() -> None:
    kept = unescape(figures_page.PICTURE.read_text())
    assert figures_page.description(PAGE) in kept, "run `python -m benchmarks.figures_page` with PYTHONPATH=tools"


def test_the_picture_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures_page.draw(PAGE, tmp_path / "figures.svg")
    assert figures_page.description(PAGE) in unescape((tmp_path / "figures.svg").read_text())
