"""After a time-out, ranks of the node that noticed nothing write their reports before the job ends."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from syncline.collectives import CollectiveTimeout, RankLostError, TransportError
from syncline.collectives.health import report
from syncline.collectives.health.liveness import Run
from syncline.collectives.health.report import Reporter
from syncline.collectives.startup import silent_ranks
from syncline.collectives.startup.silent_ranks import NoteWatch, let_silent_ranks_report


def reports(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*/*"))


def test_a_silent_rank_writes_one_report_when_the_note_is_there(tmp_path: Path) -> None:
    watch = NoteWatch(Reporter("today", 1, 2, str(tmp_path)), tmp_path / "note")
    watch.look(0.0)
    assert reports(tmp_path) == []
    (tmp_path / "note").touch()
    watch.look(1.0)
    watch.look(2.0)
    assert reports(tmp_path) == ["rank-1.1.json"]
    assert "another rank of this node timed out" in (tmp_path / "syncline-report-today" / "rank-1.1.json").read_text()
    assert watch.is_idle


@pytest.mark.parametrize(("reason", "expected"), [("its own failure", 1), ("SIGUSR1", 2)])
def test_a_rank_that_has_reported_its_own_failure_writes_no_second_report(tmp_path: Path, reason: str, expected: int) -> None:
    reporter = Reporter("today", 1, 2, str(tmp_path))
    reporter.write(reason)
    (tmp_path / "note").touch()
    NoteWatch(reporter, tmp_path / "note").look(0.0)
    assert len(reports(tmp_path)) == expected


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


def test_a_rank_ignores_its_own_note(monkeypatch: pytest.MonkeyPatch, note: Path, tmp_path: Path) -> None:
    watch = NoteWatch(Reporter("today", 0, 2, str(tmp_path)), note)
    seen: list[bool] = []

    def look(_: float) -> None:
        seen.append(note.exists())
        watch.look(0.0)

    monkeypatch.setattr(silent_ranks, "_watch", watch)
    monkeypatch.setattr(time, "sleep", look)
    let_silent_ranks_report(CollectiveTimeout("it did not finish"))
    assert seen == [True]
    assert reports(tmp_path) == []


def test_a_time_out_behind_another_error_counts(monkeypatch: pytest.MonkeyPatch, note: Path) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(time, "sleep", lambda _: seen.append(note.exists()))
    error = TransportError("had failed before")
    error.__cause__ = CollectiveTimeout("it did not finish")
    let_silent_ranks_report(error)
    assert seen == [True]


class Unprintable(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_without_a_text_is_no_time_out(monkeypatch: pytest.MonkeyPatch, note: Path) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("this error is no time-out"))
    let_silent_ranks_report(Unprintable())
    let_silent_ranks_report(RuntimeError(Unprintable()))
    assert not note.exists()


def test_old_notes_are_removed(monkeypatch: pytest.MonkeyPatch, note: Path) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    old = note.with_name("timed-out-yesterday")
    old.touch()
    os.utime(old, (0, 0))
    let_silent_ranks_report(CollectiveTimeout("it did not finish"))
    assert not old.exists()


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
    let_silent_ranks_report(ValueError("of the script"), failed_first=False)
    assert not note.exists()


@pytest.mark.parametrize("error", [TransportError("closed by a peer"), RuntimeError("in a callback: TransportError: closed")])
def test_a_rank_that_failed_later_waits_until_the_first_rank_has_waited(
    monkeypatch: pytest.MonkeyPatch, note: Path, error: Exception
) -> None:
    seen: list[bool] = []

    def first_rank(_: float) -> None:
        seen.append(note.exists())
        # The first rank leaves its note after three looks, and removes it after two more.
        if len(seen) == 3:
            note.touch()
        if len(seen) == 5:
            note.unlink()

    monkeypatch.setattr(silent_ranks, "_NOTE_S", 0.0)
    monkeypatch.setattr(time, "sleep", first_rank)
    let_silent_ranks_report(error, failed_first=False)
    assert seen == []
    monkeypatch.setattr(silent_ranks, "_NOTE_S", 60.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0 if len(seen) < 5 else 61.0)
    let_silent_ranks_report(error, failed_first=False)
    assert seen == [False, False, False, True, True]


def test_a_rank_that_failed_later_waits_for_a_note_that_stays_only_for_a_while(
    monkeypatch: pytest.MonkeyPatch, note: Path
) -> None:
    note.touch()
    now_s = itertools.count()
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now_s)))
    let_silent_ranks_report(TransportError("closed by a peer"), failed_first=False)
    assert note.exists()  # the note belongs to the other rank


def test_no_rank_waits_if_reports_are_off(monkeypatch: pytest.MonkeyPatch, note: Path) -> None:
    monkeypatch.setattr(report, "report_folder", lambda: "")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("nobody writes a report"))
    let_silent_ranks_report(CollectiveTimeout("it did not finish"))
    assert not note.exists()
