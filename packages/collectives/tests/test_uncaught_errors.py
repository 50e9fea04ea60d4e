"""What a rank prints that fails before the ranks are connected."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import pytest

from syncline.collectives import LaunchError
from syncline.collectives.startup import launch, uncaught_errors
from syncline.collectives.startup.uncaught_errors import FRESH_S, in_text, is_first, started_s


def test_one_of_those_that_fail_alike_speaks(tmp_path: Path) -> None:
    start_s = time.time() - 1.0
    with ThreadPoolExecutor(8) as processes:
        found = list(processes.map(lambda _: is_first("this", start_s, tmp_path / "own"), range(8)))
    assert sorted(found) == [False] * 7 + [True]
    assert is_first("that", start_s, tmp_path / "own")
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["spoken"]


def test_the_next_run_speaks_again_also_at_once(tmp_path: Path) -> None:
    """A shell, or torchrun's agent, starts it: the same parent, the same words."""
    first_s = time.time() - 1.0
    assert is_first("this", first_s, tmp_path)
    second_s = time.time()
    assert is_first("this", second_s, tmp_path)
    assert not is_first("this", second_s, tmp_path)
    assert not is_first("this", first_s, tmp_path)


def test_what_was_said_is_forgotten_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long_ago_s = time.time() - 10 * FRESH_S
    for name in ("this", "that"):
        assert is_first(name, long_ago_s, tmp_path)
    now_s = time.time() + FRESH_S + 1.0
    monkeypatch.setattr(uncaught_errors.time, "time", lambda: now_s)
    assert is_first("this", long_ago_s, tmp_path)
    assert list(json.loads((tmp_path / "spoken").read_text())) == ["this"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"this": "x"}'])
def test_a_file_that_was_cut_short_keeps_nobody_silent(tmp_path: Path, text: str) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "spoken").write_text(text)
    assert is_first("this", time.time() - 1.0, tmp_path)


def test_where_nothing_can_be_written_everybody_speaks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        assert is_first("this", 0.0, tmp_path / "file" / "none")


def test_the_start_of_this_process() -> None:
    assert 0.0 < time.time() - started_s() < 86400.0
    begun_s = time.time()
    program = "from syncline.collectives.startup.uncaught_errors import started_s; print(started_s())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout
    assert begun_s - 0.1 < float(told) < time.time()  # the system counts in hundredths of a second


def raised() -> tuple[LaunchError, TracebackType | None]:
    with pytest.raises(LaunchError) as caught:
        launch.detect_launch({"WORLD_SIZE": "2"})
    return caught.value, caught.tb


def test_an_error_of_ours_ends_at_the_users_line(caplog: pytest.LogCaptureFixture) -> None:
    error, trace = raised()
    error.__cause__ = OSError("a cause that the message has told")
    said = in_text(error, trace)
    assert 'launch.detect_launch({"WORLD_SIZE": "2"})' in said
    assert "raise LaunchError" not in said
    assert "a cause that" not in said
    assert f"LaunchError: {error}\n" in said
    with caplog.at_level(logging.DEBUG, logger="syncline.collectives"):
        assert "raise LaunchError" in in_text(error, trace)


def test_other_errors_are_shown_as_ever() -> None:
    error = ValueError("the user's")
    error.__cause__ = OSError("its cause")
    assert "its cause" in in_text(error, None)


FAILING = "from syncline.collectives import init_process_group; init_process_group('nosuchbackend')"


def test_a_command_that_is_typed_twice_says_it_twice_and_briefly(tmp_path: Path) -> None:
    """By one parent, at once. What it leaves behind is one small file for all."""
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TMPDIR": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", FAILING], env=environ, capture_output=True, text=True, timeout=60)
        assert "UnknownBackendError: unknown backend 'nosuchbackend'" in done.stderr
        assert len(done.stderr.splitlines()) <= 6, done.stderr
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.iterdir()] == ["spoken"]
