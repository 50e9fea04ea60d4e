"""Reports: written by each rank, read and merged."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from syncline.collectives import InvalidArgumentError
from syncline.collectives.__main__ import main
from syncline.collectives.engine.call import DONE, Call, Signature
from syncline.collectives.health import report
from syncline.collectives.health.recorder import MOST_CALLS, Recorder
from syncline.collectives.health.report import Reporter, merged, read_reports

CALLS = {"a": "all_reduce", "b": "broadcast", "g": "all_gather"}


def recorded(letters: str, rank: int, *, size: int, unfinished: bool = False) -> Recorder:
    recorder = Recorder("default", rank, range(size))
    for number, letter in enumerate(letters):
        call = Call(Signature.of(CALLS[letter], torch.ones(2)), number)
        recorder.add(call)
        recorder.begin(call)
        if not (unfinished and number == len(letters) - 1):
            call.is_over(DONE)
    return recorder


def reports_of(folder: Path, histories: list[str], *, unfinished: bool = False, written_by: list[int] | None = None) -> Path:
    made = None
    for rank, letters in enumerate(histories):
        if written_by is not None and rank not in written_by:
            continue
        reporter = Reporter("today", rank, len(histories), str(folder))
        recorder = recorded(letters, rank, size=len(histories), unfinished=unfinished)
        reporter.watch(recorder)
        made = reporter.write("a test")
    assert made is not None
    return made


def test_one_file_for_each_rank(tmp_path: Path) -> None:
    made = reports_of(tmp_path, ["ab", "ab"])
    assert made == tmp_path / "syncline-report-today"
    assert sorted(path.name for path in made.iterdir()) == ["rank-0.1.json", "rank-1.1.json"]
    first, second = read_reports(made)
    assert (first.rank, second.rank, first.size) == (0, 1, 2)
    assert first.reason == "a test"
    assert "test_report.py" in first.stacks
    assert [call.name for call in first.groups[0].calls] == ["all_reduce", "broadcast"]


@pytest.mark.parametrize(
    ("histories", "said"),
    [
        (["abg", "abg", "ag"], "rank 2 skipped broadcast #1 (it called all_gather(float32[2]) #1 at test_report.py"),
        (["ab", "a"], "rank 1 has not come to broadcast #1; rank 0 called broadcast(float32[2]) #1 at test_report.py"),
        (["ab", "ab"], "all made the same calls, and finished them"),
    ],
)
def test_the_sentence(tmp_path: Path, histories: list[str], said: str) -> None:
    assert said in merged(read_reports(reports_of(tmp_path, histories)))


def test_a_call_that_nobody_finished(tmp_path: Path) -> None:
    made = reports_of(tmp_path, ["ab", "ab"], unfinished=True)
    assert "all made the same calls; ranks 0, 1 did not finish broadcast(float32[2]) #1" in merged(read_reports(made))


def test_calls_that_sends_have_pushed_out_still_count(tmp_path: Path) -> None:
    for rank, letters in enumerate(["abg", "abg", "abga"]):
        recorder = recorded(letters, rank, size=3)
        for _ in range(0 if rank == 2 else MOST_CALLS):
            send = Call(Signature.of("send", torch.ones(2)), None)
            recorder.add(send)
            recorder.begin(send)
            send.is_over(DONE)
        reporter = Reporter("today", rank, 3, str(tmp_path))
        reporter.watch(recorder)
        reporter.write("a test")
    said = merged(read_reports(tmp_path / "syncline-report-today"))
    assert [line.split()[3] for line in said.splitlines() if re.match(r"\d  ", line)] == ["3", "3", "4"]
    assert "ranks 0, 1 have not come to all_reduce #3; rank 2 called all_reduce" in said


def test_ranks_that_wrote_nothing_are_named(tmp_path: Path) -> None:
    made = reports_of(tmp_path, ["ab", "ab", "ab"], written_by=[0, 2])
    said = merged(read_reports(made))
    assert said.startswith("2 of 3 rank(s) have reported\nrank 1 wrote nothing")


def test_nothing_is_overwritten_and_the_latest_is_read(tmp_path: Path) -> None:
    reports_of(tmp_path, ["a"])
    made = reports_of(tmp_path, ["ab"])
    assert sorted(path.name for path in made.iterdir()) == ["rank-0.1.json", "rank-0.2.json"]
    earlier, latest = read_reports(made)
    assert earlier.groups == ()
    assert len(latest.groups[0].calls) == 2
    assert "broadcast(float32[2]) #1" in merged([earlier, latest])


def test_a_process_writes_only_so_many(tmp_path: Path) -> None:
    reporter = Reporter("today", 0, 1, str(tmp_path))
    folders = [reporter.write("again") for _ in range(40)]
    assert folders[0] is not None
    assert folders[-1] is None
    assert len(list(folders[0].iterdir())) < 40


def test_an_empty_folder_name_switches_reports_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SYNCLINE_REPORT_DIR", "")
    assert Reporter("today", 0, 1).write("a test") is None
    assert not list(tmp_path.iterdir())


def test_where_it_cannot_be_written_nothing_is_raised(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert Reporter("today", 3, 4, str(tmp_path / "file")).write("a test") is None
    assert "rank 3 cannot write its report" in capfd.readouterr().err


def test_a_fork_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = Reporter("today", 0, 1, str(tmp_path))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert reporter.write("a test") is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = reports_of(tmp_path, ["abg", "abg", "ag"])
    assert main(["report", str(made), "--stacks", "2"]) == 0
    said = capsys.readouterr().out
    assert "group 'default' of ranks 0, 1, 2" in said
    assert "the threads of rank 2, which reported because of: a test" in said


def test_a_rank_without_report_has_no_stacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = reports_of(tmp_path, ["ab", "ab", "ab"], written_by=[0, 2])
    assert main(["report", str(made), "--stacks", "1"]) == 2
    assert "--stacks 1: that rank wrote no report" in capsys.readouterr().err


def test_what_a_rank_without_report_called_is_not_known(tmp_path: Path) -> None:
    said = merged(read_reports(reports_of(tmp_path, ["ab", "ab", "ab"], unfinished=True, written_by=[0, 2])))
    assert "all that reported (ranks 0, 2) made the same calls; ranks 0, 2 did not finish broadcast" in said
    assert said.endswith("; what rank 1 called is not known")


def test_the_first_report_says_why(tmp_path: Path) -> None:
    assert "rank 0 reported first: a test" in merged(read_reports(reports_of(tmp_path, ["a", "a"])))


def test_the_first_report_is_the_cause_although_its_rank_reports_again(tmp_path: Path) -> None:
    texts = [(1, 4.0, "SIGUSR1"), (0, 5.0, "the cause"), (1, 6.0, "rank 0 has failed"), (0, 7.0, "another group failed")]
    for number, (rank, written_at, reason) in enumerate(texts):
        content = {"rank": rank, "size": 2, "host": "h", "pid": 1, "written_at": written_at, "reason": reason}
        (tmp_path / f"rank-{rank}.{number}.json").write_text(json.dumps({**content, "groups": [], "stacks": reason}))
    assert merged(read_reports(tmp_path)).startswith("2 of 2 rank(s) have reported\n\nrank 0 reported first: the cause")


def test_the_site_names_the_folder_and_the_variable_goes_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SYNCLINE_REPORT_DIR", raising=False)
    monkeypatch.setattr(report, "_site_folder", None)
    assert report.report_folder() == "."
    report.set_report_folder(str(tmp_path / "site"))
    assert Reporter("today", 0, 1).write("a test") == tmp_path / "site" / "syncline-report-today"
    monkeypatch.setenv("SYNCLINE_REPORT_DIR", str(tmp_path / "own"))
    assert Reporter("today", 0, 1).write("a test") == tmp_path / "own" / "syncline-report-today"


@pytest.mark.parametrize("text", ["", "{}", '{"groups": 3}', '{"groups": []}', "[]", "[" * 100_000])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0.1.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"rank-0\.1\.json is no report of Syncline"):
        read_reports(tmp_path)


WRONG_ENTRIES = [
    *[("", name, "2") for name in ("rank", "size", "pid", "written_at")],
    *[("", name, None) for name in ("host", "reason", "stacks", "size")],
    ("group", "name", 3),
    ("group", "begun", "3"),
    ("group", "ranks", ["0", "1"]),
    ("group", "ranks", [[0], [1]]),
    *[("call", name, []) for name in ("number", "position", "words", "digest", "state", "where")],
]


@pytest.mark.parametrize(("where", "name", "value"), WRONG_ENTRIES)
def test_entries_of_another_type_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, name: str, value: object
) -> None:
    path = reports_of(tmp_path, ["ab", "ab"], written_by=[1]) / "rank-1.1.json"
    content = json.loads(path.read_text())
    group = content["groups"][0]
    {"": content, "group": group, "call": group["calls"][0]}[where][name] = value
    path.write_text(json.dumps(content))
    assert main(["report", str(tmp_path)]) == 2
    assert re.search(
        rf"rank-1\.1\.json is no report of Syncline: TypeError: expected .* as {name}, found", capsys.readouterr().err
    )


def test_reports_are_shown_beside_files_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    made = reports_of(tmp_path, ["ab", "ab"], written_by=[0])
    (made / "rank-1.1.json").touch()
    other = tmp_path / "syncline-report-other"
    other.mkdir()
    (other / "rank-0.1.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 0
    assert "1 of 2 rank(s) have reported" in capsys.readouterr().out
    assert [re.findall(r"left out: .*/(.*/rank.*) is no report of Syncline", said) for said in caplog.messages] == [
        ["syncline-report-today/rank-1.1.json"],
        ["syncline-report-other/rank-0.1.json"],
    ]


def test_a_process_that_ends_while_it_writes_leaves_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def ends(*_: object) -> None:
        raise Killed

    for name in ("replace", "rename", "link"):
        monkeypatch.setattr(os, name, ends)
    with pytest.raises(Killed):
        reports_of(tmp_path, ["ab"])
    assert not list(tmp_path.glob("*/rank-*"))


def test_an_empty_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "expected files rank-*.json" in capsys.readouterr().err
