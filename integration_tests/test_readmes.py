"""The Python examples of every README run as they stand, alone (a group of one)."""

from __future__ import annotations

from pathlib import Path

import pytest
from mktestdocs import check_md_file

READMES = sorted((Path(__file__).parent.parent / "packages").glob("*/README.md"))


@pytest.mark.launch
@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_examples_run(readme: Path) -> None:
    assert "```python" in readme.read_text(), "a README without an example would pass"
    check_md_file(fpath=readme, memory=True)
