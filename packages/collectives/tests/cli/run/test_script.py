"""How `syncline run` finds its script."""

from __future__ import annotations

import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from syncline.collectives.cli.run.script import ScriptError, find_script, run_script


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the script replaces the first entry, which is that of the command."""
    monkeypatch.setattr(sys, "path", ["replaced", *sys.path])


@pytest.mark.parametrize("is_module", [False, True])
def test_a_removed_working_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_module: bool) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ScriptError, match="the working directory does not exist any more"):
        find_script("train", is_module=is_module)


@pytest.mark.parametrize("is_zip", [False, True])
def test_a_folder_and_a_zip_file_run_as_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_zip: bool
) -> None:
    app = tmp_path / "app"
    files = {
        "__main__.py": "import sys, helping\nprint(sys.path[0], sys.argv, repr(__package__), __name__, helping.WORD)",
        "helping.py": "WORD = 'help'",
    }
    if is_zip:
        with ZipFile(app, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
    else:
        app.mkdir()
        for name, text in files.items():
            (app / name).write_text(text)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    run_script(find_script(str(app), is_module=False), ["--steps", "3"])
    monkeypatch.delitem(sys.modules, "helping")
    assert capsys.readouterr().out == f"{app} ['{app}', '--steps', '3'] '' __main__ help\n"


def test_a_folder_without_a_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"has no __main__\.py; name a file"):
        find_script(str(tmp_path), is_module=False)


def test_a_program_of_the_machine_is_no_script() -> None:
    with pytest.raises((ScriptError, SyntaxError), match=r"null bytes|no Python script"):
        find_script(sys.executable, is_module=False)
