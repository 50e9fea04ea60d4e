from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import ROOT, capture, follow
from side_by_side import Job, run_side_by_side

TOUCH = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
# Ends when the file of another job is there. So two such jobs end only if they run side by side.
TOUCH_AND_WAIT = f"{TOUCH}\nimport time\nwhile not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)"


def python(name: str, program: str, *words: str | Path, timeout_s: float = 60.0) -> Job:
    return Job(name, (sys.executable, "-c", program, *words), timeout_s=timeout_s)


def _run_side_by_side(program: str) -> object:
    return run_side_by_side([python("long", program)], 1)


def _run_captured(program: str) -> object:
    return capture((sys.executable, "-c", program), timeout_s=60, cwd=ROOT, env={})


def _run_in_the_foreground(program: str) -> object:
    return follow((sys.executable, "-c", program), timeout_s=60, cwd=ROOT, env={})


def test_two_run_at_once(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    ended = run_side_by_side([python("a", TOUCH_AND_WAIT, a, b), python("b", TOUCH_AND_WAIT, b, a)], 2)
    assert [one.status for one in ended] == [0, 0]


def test_no_more_than_asked_for_run_at_once_and_in_order(tmp_path: Path) -> None:
    alone = "import pathlib, sys; here = pathlib.Path(sys.argv[1]); here.mkdir(); here.rmdir()"
    ended = run_side_by_side([python(name, alone, tmp_path / "one") for name in "abc"], 1)
    assert [(one.name, one.status) for one in ended] == [("a", 0), ("b", 0), ("c", 0)]


def test_a_failure_stops_no_other_and_all_output_is_shown_under_the_jobs_name(capsys: pytest.CaptureFixture[str]) -> None:
    ended = run_side_by_side([python("bad", "print('said'); raise SystemExit(3)"), python("good", "print('also')")], 1)
    assert [(one.name, one.status) for one in ended] == [("bad", 3), ("good", 0)]
    bad, good = capsys.readouterr().out.split("=== good ")
    assert "=== bad (" in bad
    assert bad.rstrip().endswith("said")
    assert good.rstrip().endswith("also")


def test_what_hangs_is_ended_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    (ended,) = run_side_by_side([python("late", "import time; time.sleep(600)", timeout_s=0.5)], 1)
    assert ended.status == 124
    assert "late did not end within 0.5 s, and was ended" in capsys.readouterr().out


def test_the_processor_time_of_each_is_its_own_with_its_childrens() -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    jobs = [python("parent", parent), python("idle", "import time; time.sleep(0.5)")]
    used_s = {one.name: one.processor_s for one in run_side_by_side(jobs, 2)}
    assert used_s["parent"] >= 0.5
    assert used_s["idle"] < 0.5


def test_an_interrupt_ends_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    program = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"

    def interrupt(seconds: float) -> None:
        time.sleep(seconds)
        if started.exists() and started.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr("side_by_side.time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side([python("long", program, started)], 1)
    assert not _is_there(int(started.read_text()))


@pytest.mark.parametrize("run", [_run_side_by_side, _run_captured, _run_in_the_foreground])
def test_an_interrupt_within_a_start_loses_no_process(run: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[int]()

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("commands.subprocess.Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("import time; time.sleep(600)")
    assert not _is_there(*started)


def test_a_signal_to_dev_ends_what_it_started_even_if_the_signal_is_repeated(tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, _: os.kill(os.getppid(), number))
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""
    script = f"""
import commands, dev, sys
commands.GRACE_S = 3.0
from side_by_side import Job, run_side_by_side
dev.unit = lambda options: run_side_by_side([Job("long", (sys.executable, "-c", {program!r}, {str(started)!r}))], 1)
dev.exit_on_sigterm()
sys.exit(dev.main(["unit", "--skip-install"]))
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT / "tools", stdout=subprocess.DEVNULL) as process:
        while not (started.exists() and started.read_text()):
            time.sleep(0.02)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    end_s = time.monotonic() + 30
    while _is_there(int(started.read_text())):  # it was killed, but stays until its new parent has read its status
        assert time.monotonic() < end_s
        time.sleep(0.02)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
