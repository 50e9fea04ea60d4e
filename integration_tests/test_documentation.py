"""The Python examples of every README and every page of the site run as they stand, alone (a group of one)."""

from __future__ import annotations

from pathlib import Path

import pytest
from mktestdocs import check_md_file

ROOT = Path(__file__).parent.parent
READMES = sorted((ROOT / "packages").glob("*/README.md"))
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "```python" in page.read_text()]

pytestmark = pytest.mark.launch


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_examples_of_a_readme_run(readme: Path) -> None:
    assert "```python" in readme.read_text(), "a README without an example would pass"
    check_md_file(fpath=readme, memory=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_examples_of_a_page_run(page: Path) -> None:
    check_md_file(fpath=page, memory=True)


def test_most_pages_have_examples() -> None:
    assert len(PAGES) >= 10
