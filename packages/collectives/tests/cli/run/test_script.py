"""How `syncline run` finds its script."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.collectives.cli.run.script import ScriptError, find_script


@pytest.mark.parametrize("is_module", [False, True])
def test_a_removed_working_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_module: bool) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ScriptError, match="the working directory does not exist any more"):
        find_script("train", is_module=is_module)
