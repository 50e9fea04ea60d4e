"""The commands, run alone: in a process of their own where the environment matters, else here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from syncline.collectives.__main__ import main
from syncline.collectives.health.report import Reporter
from test_support.jobs import LIMIT_S

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).parents[2] / "pyproject.toml"

LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "SYNCLINE_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_ADDR")


@pytest.fixture
def syncline(python: list[str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a process and a folder of its own."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        command = [*python, "-m", "syncline.collectives", *arguments]
        environ |= {"OMP_NUM_THREADS": "1", **variables}
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT_S)

    return run


def test_doctor_alone(syncline) -> None:
    done = syncline("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "launcher" in done.stdout
    assert "in_process (nothing launched this process" in done.stdout
    assert "1 rank(s) connected, and an all_reduce gave the right sum" in done.stdout


def test_doctor_names_what_is_wrong(syncline, tmp_path: Path) -> None:
    done = syncline("doctor", SYNCLINE_SITE=str(tmp_path / "gone.toml"))
    assert done.returncode == 1
    assert "WRONG  connection" in done.stdout
    assert "gone.toml" in done.stdout
    assert "->" in done.stdout


def test_doctor_shows_the_site_file(syncline, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('timeout_s = 600\nreport_dir = "/scratch"\n')
    done = syncline("doctor", SYNCLINE_SITE=str(tmp_path / "site.toml"))
    assert 'site.toml changes timeout_s = 600, report_dir = "/scratch"' in " ".join(done.stdout.split())


def test_doctor_knows_no_such_backend(syncline) -> None:
    done = syncline("doctor", "--backend", "foo")
    assert done.returncode == 1
    assert "WRONG  backend" in done.stdout
    assert "no backend 'foo' is installed (given as argument)" in done.stdout


def test_characters_that_the_output_lacks_are_written_in_ascii(tmp_path: Path) -> None:
    Reporter("today", 0, 1, str(tmp_path)).write("ol\u00e9 \u2500 \udce9")  # a table's line, and a byte of a name of a file
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "syncline.collectives", "report", str(tmp_path), "--html", str(page)]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ol\\xe9 \\u2500 \\udce9" in done.stdout
    assert "ol\u00e9 \u2500 \\udce9" in page.read_text(encoding="utf-8")


def test_output_that_nobody_reads_is_no_traceback(python: list[str], tmp_path: Path) -> None:
    Reporter("today", 0, 1, str(tmp_path)).write("a test")
    reader, writer = os.pipe()
    os.close(reader)
    command = [*python, "-m", "syncline.collectives", "report", str(tmp_path)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_no_command_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    for name in ("bench", "doctor", "report", "run"):
        assert re.search(rf"^ +{name} ", said, re.MULTILINE), said


def test_help_shows_defaults_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "(default: all_reduce)" in said
    assert "['" not in said


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "soon"])
def test_bench_refuses_a_time_that_is_none(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", f"--seconds={seconds}"])
    assert "expected a number of seconds above 0" in capsys.readouterr().err


def test_bench_says_what_it_measures_and_shows_what_it_has_when_it_is_cut_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from syncline.collectives.cli.bench import command

    measured = []

    def measure(case, *others):
        if measured:
            raise KeyboardInterrupt
        measured.append(case)
        return real(case, *others)

    real = command.measure
    monkeypatch.setattr(command, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        main(["bench", "--sizes", "4", "64", "--seconds", "0.01", "--backends", "in_process"])
    out, err = capsys.readouterr()
    assert "measuring 1 of 3: all_reduce float32 4\n" in err
    assert "measuring 2 of 3: all_reduce float32 16\n" in err
    assert "all_reduce" in out
    assert "cut short: 1 of 3 cases were measured" in out


def test_doctor_on_contradicting_launchers(syncline) -> None:
    variables = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"}
    # Not to be started as a process of a job that does not exist.
    done = syncline("doctor", MPI4PY_LIBMPI="/nonexistent/libmpi.so", **variables)
    assert done.returncode == 1
    assert "WRONG  launcher" in done.stdout
    assert "RANK=1 and WORLD_SIZE=2" in " ".join(done.stdout.split())


def test_bench_alone(syncline, tmp_path: Path) -> None:
    done = syncline(
        *("bench", "--collective", "all_reduce", "barrier", "--sizes", "4", "1K", "--factor", "16", "--seconds", "0.01"),
        *("--dtypes", "float32", "int64", "--json", "figures.json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "figures.json").read_text())["measurements"]
    assert [(row["collective"], row["dtype"], row["size_bytes"]) for row in rows] == [
        ("all_reduce", "float32", 4),
        ("all_reduce", "float32", 64),
        ("all_reduce", "float32", 1024),
        ("all_reduce", "int64", 8),
        ("all_reduce", "int64", 64),
        ("all_reduce", "int64", 1024),
        ("barrier", "float32", 0),
    ]
    assert {row["backend"] for row in rows} == {"in_process"}
    assert "all_reduce, int64" in done.stdout


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="pip install 'syncline-collectives[bench]'")
def test_bench_draws(syncline, tmp_path: Path) -> None:
    done = syncline("bench", "--sizes", "4", "64", "--seconds", "0.01", "--plot", "figures.png")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--backends", "smoke"],
            "unknown backend 'smoke' to measure; known are gloo, in_process, mpi, nccl, raw-mpi, torch-gloo",
        ),
        (["--dtypes", "float31"], "expected a dtype of numbers such as float32, bfloat16 or int64, found 'float31'"),
        (["--sizes", "4", "many"], "expected a size such as"),
        (["--sizes", "8", "4"], "expected a smallest and a largest size"),
        (["--json", "no/such/folder.json"], "there is no folder"),
        (["--json", "/"], "cannot write /: it is a folder"),
        (["--plot", "figures.gossip"], "cannot write figures.gossip: expected one of the suffixes"),
        (["--plot", "figures"], "cannot write figures: expected one of the suffixes"),
        (["--collective", "gossip"], "invalid choice: 'gossip'"),
    ],
)
def test_bench_refuses(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["bench", *arguments])
    except SystemExit as ended:  # argparse's way
        status = ended.code
    assert status == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_bench_writes_its_figures_although_it_cannot_print(python: list[str], tmp_path: Path) -> None:
    options = ["--sizes", "1", "4", "--seconds", "0.01", "--dtypes", "int32", "int32", "--json", "figures.json"]
    command = [*python, "-m", "syncline.collectives", "bench", *options]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert "No space left on device" in done.stderr
    # A dtype that is named twice is measured once. So are sizes that are equal after rounding.
    (measured,) = json.loads((tmp_path / "figures.json").read_text())["measurements"]
    assert (measured["dtype"], measured["size_bytes"]) == ("int32", 4)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_bench_names_the_file_for_which_there_is_no_space(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--sizes", "4", "4", "--seconds", "0.01", "--json", "/dev/full"]) == 2
    said = capsys.readouterr()
    assert "syncline: cannot write /dev/full: No space left on device" in said.err
    assert "all_reduce, float32" in said.out


KILLED = """
import os, sys
from syncline.collectives.__main__ import main
from syncline.collectives.cli.bench import command
measured = []
def measure(case, *others):
    if measured:
        os._exit(9)
    measured.append(case)
    return real(case, *others)
real, command.measure = command.measure, measure
main(["bench", "--sizes", "4", "16", "--seconds", "0.01", "--json", "figures.json"])
"""


def test_bench_that_is_killed_leaves_its_figures(python: list[str], tmp_path: Path) -> None:
    done = subprocess.run([*python, "-c", KILLED], cwd=tmp_path, timeout=LIMIT_S)
    assert done.returncode == 9
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [row["size_bytes"] for row in figures["measurements"]] == [4]
    assert figures["verdicts"] == ["cut short: 1 of 2 cases were measured"]


def with_unread_errors(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command with a standard error whose reader has ended."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=writing, text=True, timeout=LIMIT_S)
    finally:
        os.close(writing)


def test_bench_measures_although_nobody_reads_its_progress(python: list[str], tmp_path: Path) -> None:
    options = ["--sizes", "4", "16", "--seconds", "0.01", "--json", "figures.json"]
    done = with_unread_errors([*python, "-m", "syncline.collectives", "bench", *options], tmp_path)
    assert done.returncode == 0
    assert "all_reduce, float32" in done.stdout
    assert len(json.loads((tmp_path / "figures.json").read_text())["measurements"]) == 2


def test_the_status_is_right_although_nobody_reads_the_error(python: list[str], tmp_path: Path) -> None:
    assert with_unread_errors([*python, "-m", "syncline.collectives", "report", "gone"], tmp_path).returncode == 2


@pytest.mark.parametrize("command", ["doctor", "bench"])
def test_help_shows_each_default_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "None" not in words
    assert not re.search(r"\(default[^()]*\) \(default", words)
    assert command == "doctor" or "(default: 4)" in words


@pytest.mark.skipif(not PROJECT.exists(), reason="the tests run away from the source tree")
def test_every_extra_brings_numpy() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    assert [name for name, needed in extras.items() if not any(entry.startswith("numpy") for entry in needed)] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"syncline-collectives {version('syncline-collectives')}\n"
