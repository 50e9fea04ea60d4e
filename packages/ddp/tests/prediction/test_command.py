"""`syncline predict`: from the files of a trace to tables, a page and one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.collectives import InvalidArgumentError
from syncline.collectives.__main__ import main
from syncline.ddp.prediction.command import parse_ranks
from syncline.ddp.prediction.replay import Gradient
from syncline.ddp.prediction.workload_of_trace import workload_of
from syncline.ddp.tracing import rendering
from syncline.ddp.tracing.events import BucketEvent, BucketLayout, StepEvent
from syncline.ddp.tracing.part import Header, header_line, layout_line, part_path, step_line
from syncline.ddp.tracing.trace_file import read_timeline

NETWORK = "latency_us=50,bandwidth_gbps=1"


def a_step(number: int, late_s: float) -> StepEvent:
    """100 ms a step: 10 of forward, gradients until 30, reduced at 60, copied back at 70, the rest is the optimizer's.

    Backward itself ends 9 ms after the last gradient, as where communication takes the core from it.
    """
    began = 0.1 * number
    ready = (began + 0.015, began + 0.030 + late_s)
    buckets = (
        BucketEvent(0, 2**20, ready[0], ready[0], began + 0.04),
        BucketEvent(1, 3 * 2**20, ready[1], ready[1], began + 0.06),
    )
    ended = began + 0.010
    return StepEvent(number, 0, began, ended, ended, ready[1], ready[1] + 0.009, began + 0.07, 0.04 - late_s, buckets)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks, steps 10 to 13; rank 1 computes 5 ms longer."""
    layout = (BucketLayout(2**20, ("c",), ((512, 512),)), BucketLayout(3 * 2**20, ("b", "a"), ((512, 512), (512, 1024))))
    for rank in range(2):
        lines = [header_line(Header(rank, 2, "here", 1, "mpi: an MPI", 0.0, "run")), layout_line(layout)]
        lines += [step_line(a_step(number, 0.005 * rank)) for number in (10, 11, 12, 13)]
        part_path(tmp_path, rank).write_text("".join(lines))
    return tmp_path


def test_the_workload_is_what_the_slowest_rank_computes(folder: Path) -> None:
    workload = workload_of(read_timeline(folder))
    assert workload.backward_s == pytest.approx(0.035)
    assert workload.rest_s == pytest.approx(0.040)
    gradients = [gradient for bucket in workload.buckets for gradient in bucket.gradients]
    assert [gradient.shape for gradient in gradients] == [(512, 512), (512, 512), (512, 1024)]
    assert gradients == [
        Gradient(gradients[0].shape, 2**20, pytest.approx(0.015)),
        Gradient(gradients[1].shape, 2**20, pytest.approx(0.015 + 0.020 / 3)),
        Gradient(gradients[2].shape, 2**21, pytest.approx(0.035)),
    ]


def test_the_command_prints_a_row_for_each_number_of_ranks_and_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich", reason="rich is not installed: syncline-ddp[report]")
    words = ["--network", NETWORK, "--ranks", "2..8", "--speed", "bf16=50", "--speed", "powersgd-4=10"]
    assert main(["predict", str(folder), *words]) == 0
    said = capsys.readouterr().out
    assert "from a trace of 2 of 2 rank(s); 50 us and 1 Gbit/s between nodes, 1 rank(s) on each" in " ".join(said.split())
    rows = [line.split() for line in said.splitlines()]
    # Two ranks: 8.49 ms from 15 on, 25.27 from 35 on: 60.27 + 40.
    assert ["2", "100.27", "25.27", "75", "%"] in [row[:5] for row in rows]
    assert [row[0] for row in rows if row and row[0].isdigit()] == ["2", "4", "8"]
    assert rows[-1][:5] == ["At", "8", "ranks", "the", "traced"]


def test_ranks_without_a_file_are_not_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich", reason="rich is not installed: syncline-ddp[report]")
    part_path(folder, 1).unlink()
    assert main(["predict", str(folder), "--network", NETWORK, "--speed", "bf16=50", "--speed", "powersgd-4=10"]) == 0
    assert "from a trace of 1 of 2 rank(s)" in capsys.readouterr().out


def test_the_page_has_both_plots(folder: Path) -> None:
    for library in ("plotly", "rich"):
        pytest.importorskip(library, reason=f"{library} is not installed: syncline-ddp[report]")
    page = folder / "page.html"
    assert main(["predict", str(folder), "--network", NETWORK, "--ranks", "2,6", "--html", str(page)]) == 0
    text = page.read_text()
    assert 'id="predict-efficiency"' in text
    assert 'id="predict-buckets"' in text
    assert "6 ranks" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2..1024", [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        ("3..9", [3, 4, 8, 9]),
        ("2..2", [2]),
        ("12, 2,6", [2, 6, 12]),
        ("7", [7]),
    ],
)
def test_numbers_of_ranks(text: str, expected: list[int]) -> None:
    assert parse_ranks(text) == expected


@pytest.mark.parametrize("text", ["1..8", "8..2", "1", "0,2", "two", "", "2..", "2...8", "-2", "2..99999999"])
def test_other_numbers_of_ranks_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--ranks: expected 2 to"):
        parse_ranks(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--network", "fast"], "expected a file of `syncline bench --json`"),
        (["--network", NETWORK, "--ranks", "1..4"], "--ranks: expected 2"),
        (["--network", NETWORK, "--per-node", "0"], "--per-node: expected at least 1"),
        (["--network", NETWORK, "--ring-bytes", "-5"], "--ring-bytes: expected at least 0"),
        (["--network", NETWORK, "--within", "5"], "expected microseconds"),
        (["--network", NETWORK, "--speed", "fp8=3"], "expected speeds of bf16 and powersgd-4, found fp8"),
        (["--network", NETWORK, "--speed", "bf16"], "expected HOOK=GB_PER_S"),
        (["--network", NETWORK, "--html", "no/such/folder/page.html"], "cannot write the page"),
    ],
)
def test_bad_arguments_are_one_line_with_the_remedy(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("plotly", "rich"):
        pytest.importorskip(library, reason=f"{library} is not installed: syncline-ddp[report]")
    assert main(["predict", str(folder), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_trace_says_how_to_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for missing in (tmp_path, tmp_path / "nothing"):
        assert main(["predict", str(missing), "--network", NETWORK]) == 2
        assert "SYNCLINE_TRACE=FOLDER" in capsys.readouterr().err


def test_a_trace_of_one_step_is_too_short(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        path = part_path(folder, rank)
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    assert main(["predict", str(folder), "--network", NETWORK]) == 2
    assert "SYNCLINE_TRACE_STEPS=10-20" in capsys.readouterr().err


def test_a_cell_of_a_wide_table_is_one_line() -> None:
    pytest.importorskip("rich", reason="rich is not installed: syncline-ddp[report]")
    wide = rendering.table("Wide", [f"best, {number}:\nMiB, ms, times" for number in range(8)])
    wide.add_row(*["traced, 12345.67, 1.00"] * 8)
    (row,) = [line for line in rendering.printed(wide).splitlines() if "traced" in line]
    assert row.count("traced, 12345.67, 1.00") == 8
