"""Commands and report readers that packages bring by entry points."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from syncline.collectives.__main__ import main

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package: a module, and metadata as pip leaves it."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(package: str, entry_points: str, source: str) -> None:
        (site / f"{package}.py").write_text(source)
        metadata = site / f"{package}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(entry_points)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, package, raising=False)

    return install


GREETING = """
HELP = "say hello"

def add_arguments(parser):
    parser.add_argument("name")

def run(arguments):
    print("hello", arguments.name)
    return 7
"""

READER = """
EXPECTED = "a file {0}.txt"

def add_arguments(parser):
    parser.add_argument("--loud-{0}", action="store_true")

def is_in(folder):
    return (folder / "{0}.txt").exists()

def text(folder, arguments):
    found = (folder / "{0}.txt").read_text()
    return found.upper() if arguments.loud_{0} else found
"""


def test_a_package_brings_a_command(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("greeting", "[syncline.commands]\ngreet = greeting\n", GREETING)
    assert main(["greet", "Ada"]) == 7
    assert capsys.readouterr().out == "hello Ada\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    words = capsys.readouterr().out
    assert "say hello" in words
    assert "doctor" in words


def test_a_broken_command_keeps_no_other_from_working(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("broken", "[syncline.commands]\nbroken = broken\n", "import no_such_module")
    install("filled", "[syncline.report_readers]\nfilled = filled\n", READER.format("filled"))
    (tmp_path / "filled.txt").write_text("found\n")
    assert main(["report", str(tmp_path)]) == 0
    assert main(["broken"]) == 2
    assert "'broken' of 'syncline.commands' cannot be loaded" in capsys.readouterr().err


def test_a_command_without_a_part_is_named(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("half", "[syncline.commands]\nhalf = half\n", "HELP = 'half'")
    assert main(["half"]) == 2
    assert "'half' lacks add_arguments, run" in capsys.readouterr().err


def test_two_packages_with_one_command_are_named(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("one", "another"):
        install(package, f"[syncline.commands]\ngreet = {package}\n", GREETING)
    assert main(["greet", "Ada"]) == 2
    assert "several packages offer 'greet' in 'syncline.commands': another, one" in capsys.readouterr().err


def test_report_shows_what_each_reader_finds(install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("steps", "calls", "absent"):
        install(name, f"[syncline.report_readers]\n{name} = {name}\n", READER.format(name))
    (tmp_path / "steps.txt").write_text("ten steps")
    (tmp_path / "calls.txt").write_text("three <calls>")
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--loud-steps", "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"three <calls>\n\nTEN STEPS\n\nwrote {page}\n"
    assert "<pre>three &lt;calls&gt;</pre>\n<pre>TEN STEPS</pre>" in page.read_text()


def test_report_of_a_reader_with_html_of_its_own(install: Install, tmp_path: Path) -> None:
    own = READER.format("steps") + "\ndef html(folder, arguments):\n    return '<h2>steps</h2>'\n"
    install("steps", "[syncline.report_readers]\nsteps = steps\n", own)
    (tmp_path / "steps.txt").write_text("ten steps")
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "<h2>steps</h2>" in page
    assert "<pre>" not in page


def test_report_shows_the_other_readers_if_one_fails(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = "from syncline.collectives import MisuseError\n" + READER.format("calls")
    fails += "\ndef text(folder, arguments):\n    raise MisuseError('a library is missing')\n"
    install("calls", "[syncline.report_readers]\ncalls = calls\n", fails)
    install("steps", "[syncline.report_readers]\nsteps = steps\n", READER.format("steps"))
    (tmp_path / "steps.txt").write_text("ten steps")
    (tmp_path / "calls.txt").touch()
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--html", str(page)]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"ten steps\n\nwrote {page}\n", "syncline: a library is missing\n")
    assert "<pre>ten steps</pre>" in page.read_text()
    # A page that cannot be written does not hide the reader's error.
    assert main(["report", str(tmp_path), "--html", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.splitlines()[0]) == ("ten steps\n", "syncline: a library is missing")
    assert "cannot write the page" in said.err


def test_report_says_what_it_expects(install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install("steps", "[syncline.report_readers]\nsteps = steps\n", READER.format("steps"))
    assert main(["report", str(tmp_path / "gone")]) == 2
    assert "no such folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "a file steps.txt" in capsys.readouterr().err


def test_an_option_for_files_that_are_not_there_is_refused(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("steps", "calls"):
        install(name, f"[syncline.report_readers]\n{name} = {name}\n", READER.format(name))
    (tmp_path / "steps.txt").write_text("ten steps")
    assert main(["report", str(tmp_path), "--loud-calls"]) == 2
    assert capsys.readouterr().err == f"syncline: --loud-calls: expected a file calls.txt, found none in {tmp_path}\n"


def test_a_page_that_cannot_be_written_is_an_error(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("steps", "[syncline.report_readers]\nsteps = steps\n", READER.format("steps"))
    (tmp_path / "steps.txt").write_text("ten steps")
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "gone" / "page.html")]) == 2
    assert "cannot write the page" in capsys.readouterr().err
