"""`syncline report` of a trace: the tables, the page, and the page as a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from syncline.collectives import MisuseError
from syncline.collectives.__main__ import main
from syncline.ddp.tracing import extras
from syncline.ddp.tracing.events import BucketEvent, BucketLayout, OptimizerEvent, StepEvent
from syncline.ddp.tracing.floor import Floor
from syncline.ddp.tracing.part import Header, header_line, layout_line, part_path, step_line
from test_support.jobs import LIMIT_S

CHROMIUM = shutil.which("chromium")


def a_step(number: int, late: float) -> StepEvent:
    began = 10.0 * number
    end = began + 6.0
    times = (began, began + 0.5, began + 0.5, began + 1 + late, began + 1 + late, end)
    buckets = (BucketEvent(0, 4096, began + 1 + late, began + 1 + late, began + 5.0),)
    return StepEvent(number, 0, *times, 5.0 - late, buckets, (OptimizerEvent("SGD", end, end + 1.0),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks, steps 10 to 12; rank 1 is late."""
    for library in ("plotly", "rich"):
        pytest.importorskip(library, reason=f"{library} is not installed: syncline-ddp[report]")
    traces = tmp_path / "traces"
    traces.mkdir()
    for rank in range(2):
        lines = [header_line(Header(rank, 2, "here", 1, "a group", 0.0, "run")), layout_line([BucketLayout(4096, ("a<b>",))])]
        lines += [step_line(a_step(number, 2.0 * rank)) for number in (10, 11, 12)]
        part_path(traces, rank).write_text("".join(lines))
    return traces


def test_the_tables_name_the_slow_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 rank(s)" in said
    rows = [line.split() for line in said.splitlines()]
    assert ["1", "3000.00", "3000.00", "3", "times", "2000.00", "6000.00"] in rows
    assert ["0", "1000.00", "5000.00", "0", "times", "-", "0.00"] in rows
    assert [row[0] for row in rows if row and row[0] in ("10", "11", "12")] == ["10", "11", "12"]


def measured(*rows: tuple[str, int, float], ranks: int = 2) -> str:
    """As `syncline bench --json` writes it."""
    names = ("backend", "size_bytes", "median_s")
    return json.dumps(
        {
            "environment": {"world_size": ranks},
            "measurements": [
                {"collective": "all_reduce", "dtype": "float32", **dict(zip(names, row, strict=True))} for row in rows
            ],
        }
    )


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [(1024, 0.5), (2048, 1.0), (4096, 1.5), (6144, 2.0), (12288, 4.0)],  # outside in proportion, between on a line
)
def test_a_floor_between_and_beyond_the_sizes_that_were_measured(nbytes: float, seconds: float) -> None:
    assert Floor(((2048.0, 1.0), (6144.0, 2.0))).seconds(nbytes) == pytest.approx(seconds)


def test_the_bandwidth_is_compared_with_the_floor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = folder / "bench.json"
    bench.write_text(measured(("mpi", 4096, 9.0), ("floor", 6144, 2.0), ("floor", 2048, 1.0)))
    assert main(["report", str(folder), "--floor", str(bench)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    # 4096 bytes take 1.5 s at best; they took 2, from the start on the rank that came last.
    assert [row[-1] for row in rows if row and row[0] in ("10", "11", "12")] == ["75"] * 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "is no file of `syncline bench --json`"),
        (measured(("mpi", 8, 1.0)), "found none; measure with"),
        (measured(("floor", 8, 1.0), ranks=3), "expected measurements on 2 rank(s), as many as the trace has, found 3"),
    ],
)
def test_a_file_without_a_floor_is_refused(text: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = folder / "bench.json"
    bench.write_text(text)
    assert main(["report", str(folder), "--floor", str(bench)]) == 2
    assert words in capsys.readouterr().err


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    with pytest.raises(MisuseError, match=r"pip install plotly rich"):
        extras.require_extra("rich")


def test_two_profiles_of_one_rank_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (folder / name).write_text('{"traceEvents": []}')
    profiles = ["--profile", f"0={folder / 'a'}", "--profile", f"0={folder / 'b'}"]
    assert main(["trace", str(folder), *profiles]) == 2
    assert "--profile: expected one file for each rank, found" in capsys.readouterr().err
    profiles[-1] = f"1={folder / 'b'}"
    assert main(["trace", str(folder), *profiles]) == 0


def test_a_failure_is_shown_in_the_same_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from syncline.collectives.health.report import Reporter

    Reporter("today", 0, 2, str(folder)).write("a test")
    page = folder.parent / "page.html"
    assert main(["report", str(folder), "--html", str(page)]) == 0
    assert "1 of 2 rank(s) have reported" in capsys.readouterr().out
    text = page.read_text()
    assert "1 of 2 rank(s) have reported" in text
    assert 'id="trace-timeline"' in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_a_browser_draws_the_page(folder: Path) -> None:
    page = folder.parent / "page.html"
    assert main(["report", str(folder), "--html", str(page)]) == 0
    assert CHROMIUM is not None
    profile = f"--user-data-dir={folder.parent / 'profile'}"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", profile, "--virtual-time-budget=10000", "--dump-dom"]
    drawn = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    plots = {
        name: drawn.split(f'id="trace-{name}"', 1)[1].split("<script", 1)[0] for name in ("timeline", "waiting", "exposed")
    }
    for name, plot in plots.items():
        assert 'class="main-svg"' in plot, name
    rows = re.findall(r'class="ytick".*?<text[^>]*translate\(0,([\d.]+)\)[^>]*>([^<]*)<', plots["timeline"])
    from_above = [name for _, name in sorted((float(y), name) for y, name in rows)]
    assert from_above == ["rank 0", "rank 0, buckets", "rank 1", "rank 1, buckets"]
    assert "rank 1" in plots["waiting"]
    assert "a&lt;b&gt;" in drawn
