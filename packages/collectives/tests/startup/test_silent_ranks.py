"""After a time-out, ranks of the node that noticed nothing write their reports before the job ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from syncline.collectives import CollectiveTimeout, RankLostError
from syncline.collectives.health import report
from syncline.collectives.health.liveness import Run
from syncline.collectives.health.report import Reporter
from syncline.collectives.startup import silent_ranks
from syncline.collectives.startup.silent_ranks import SilentRank, let_silent_ranks_report


def reports(folder: Path) -> list[str]:
    end_s = time.monotonic() + 10
    while not list(folder.glob("*/rank-1.*")) and time.monotonic() < end_s:  # another thread writes the report
        time.sleep(0.01)
    return sorted(path.name for path in folder.glob("*/rank-1.*"))


def test_a_silent_rank_writes_one_report_when_the_note_is_there(tmp_path: Path) -> None:
    silent = SilentRank(Reporter("today", 1, 2, str(tmp_path)), tmp_path / "note")
    silent.look(time.monotonic())
    assert not silent.is_idle
    (tmp_path / "note").touch()
    silent.look(time.monotonic())
    assert reports(tmp_path) == ["rank-1.1.json"]
    assert "another rank of this node timed out" in (tmp_path / "syncline-report-today" / "rank-1.1.json").read_text()
    assert silent.is_idle


def test_a_rank_that_has_just_written_its_own_report_writes_no_second_one(tmp_path: Path) -> None:
    reporter = Reporter("today", 1, 2, str(tmp_path))
    reporter.write("its own failure")
    (tmp_path / "note").touch()
    silent = SilentRank(reporter, tmp_path / "note")
    silent.look(time.monotonic())
    assert silent.is_idle
    assert reports(tmp_path) == ["rank-1.1.json"]


@pytest.fixture
def note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(silent_ranks, "current_run", lambda: Run("today", 0, 2, 1))
    monkeypatch.setattr(silent_ranks, "private_folder", lambda: tmp_path)
    monkeypatch.setattr(report, "report_folder", lambda: str(tmp_path))
    return tmp_path / "timed-out-today"


def test_the_note_is_there_only_while_the_rank_waits(monkeypatch: pytest.MonkeyPatch, note: Path) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(time, "sleep", lambda _: seen.append(note.exists()))
    let_silent_ranks_report(CollectiveTimeout("it did not finish"))
    assert seen == [True]
    assert not note.exists()


def test_the_rank_waits_if_torch_raises_the_text_of_the_time_out(monkeypatch: pytest.MonkeyPatch, note: Path) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(time, "sleep", lambda _: seen.append(note.exists()))
    let_silent_ranks_report(RuntimeError("Got the following error when running the callback: CollectiveTimeout: all_reduce"))
    assert seen == [True]


def test_ctrl_c_ends_the_wait_and_leaves_no_note(monkeypatch: pytest.MonkeyPatch, note: Path) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    let_silent_ranks_report(CollectiveTimeout("it did not finish"))
    assert not note.exists()


def test_no_rank_waits_after_another_error(monkeypatch: pytest.MonkeyPatch, note: Path) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("this error is no time-out"))
    let_silent_ranks_report(RankLostError("rank 1 is gone", [1]))
    let_silent_ranks_report(ValueError("of the script"))
    assert not note.exists()


def test_no_rank_waits_if_reports_are_off(monkeypatch: pytest.MonkeyPatch, note: Path) -> None:
    monkeypatch.setattr(report, "report_folder", lambda: "")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("nobody writes a report"))
    let_silent_ranks_report(CollectiveTimeout("it did not finish"))
    assert not note.exists()
