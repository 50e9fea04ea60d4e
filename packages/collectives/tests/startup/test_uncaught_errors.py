"""What a rank prints that fails before the ranks are connected."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import pytest
import torch

from syncline.collectives import LaunchError, RankLostError, SynclineError, TransportError
from syncline.collectives.health import liveness
from syncline.collectives.startup import launch, uncaught_errors
from syncline.collectives.startup.settings import load_settings
from syncline.collectives.startup.uncaught_errors import (
    FRESH_S,
    in_text,
    is_first,
    last_words,
    run_began_s,
    say,
    spoke_before,
    started_s,
)
from test_support.jobs import LIMIT_S


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


def test_a_rank_that_a_launcher_starts_late_does_not_repeat_the_first_ones_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uncaught_errors, "started_s", time.time)  # this process starts now
    assert is_first("this", run_began_s(), tmp_path)
    assert is_first("this", run_began_s(), tmp_path)  # no launcher: it may be the next run
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert not is_first("this", run_began_s(), tmp_path)


def test_the_start_of_this_process() -> None:
    assert 0.0 < time.time() - started_s() < 86400.0
    begun_s = time.time()
    program = "from syncline.collectives.startup.uncaught_errors import started_s; print(started_s())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
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


def test_causes_that_libraries_have_raised_inside_syncline_are_left_out(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text("this is no TOML")
    error, trace = through(load_settings, {"SYNCLINE_SITE": str(site)})
    said = in_text(error, trace)
    assert type(error).__name__ == "SiteFileError"
    assert str(site) in said
    assert "direct cause" not in said
    assert "TOMLDecodeError" not in said


def test_other_errors_are_shown_as_ever() -> None:
    error = ValueError("the user's")
    error.__cause__ = OSError("its cause")
    assert "its cause" in in_text(error, None)


def through(call, *arguments) -> tuple[Exception, TracebackType | None]:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call(*arguments)
    return caught.value, caught.tb


class Failing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"the user's, of {x.numel()}")


def test_frames_of_torch_are_left_out_and_a_setting_brings_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    error, trace = through(Failing(), torch.ones(3))
    said = in_text(error, trace)
    assert "raise ValueError(f" in said
    assert "_call_impl" not in said
    assert "SYNCLINE_FULL_TRACEBACKS=1 shows them" in said
    monkeypatch.setattr(uncaught_errors, "_shows_all_frames", True)
    assert "_call_impl" in in_text(error, trace)
    monkeypatch.setenv("SYNCLINE_FULL_TRACEBACKS", "0")
    assert "_call_impl" not in in_text(error, trace)
    monkeypatch.setattr(uncaught_errors, "_shows_all_frames", False)
    monkeypatch.setenv("SYNCLINE_FULL_TRACEBACKS", "1")
    assert "_call_impl" in in_text(error, trace)


def test_of_the_stack_that_torch_puts_into_a_text_the_users_frames_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = (
        f"  {uncaught_errors.__file__}(5): write\n  /home/me/train.py(7): my_hook\n  {threading.__file__}(1002): _bootstrap\n"
    )

    def call() -> None:
        raise RuntimeError(f"the callback: CollectiveTimeout: it did not finish\n\nAt:\n{stack}") from OSError("x")

    error, trace = through(call)
    said = in_text(error, trace)
    assert "CollectiveTimeout: it did not finish" in said
    assert "uncaught_errors.py(5)" not in said
    assert "threading.py" not in said
    assert "At:\n  /home/me/train.py(7): my_hook" in said
    assert "OSError: x" in said
    monkeypatch.setenv("SYNCLINE_FULL_TRACEBACKS", "1")
    assert "uncaught_errors.py(5): write" in in_text(error, trace)


def test_where_torch_refused_something_is_shown() -> None:
    said = in_text(*through(torch.nn.Linear(2, 2), torch.ones(3)))
    assert "shapes cannot be multiplied" in said
    assert "F.linear" in said


def test_a_bug_of_syncline_is_shown_with_all_frames() -> None:
    error, trace = through(launch.detect_launch, None)  # an AttributeError or a TypeError inside
    assert not isinstance(error, SynclineError)
    assert f"{os.sep}launch.py" in in_text(error, trace)


def test_what_the_users_code_raised_before_is_kept() -> None:
    def call() -> None:
        try:
            raise ValueError("the user's own")
        finally:
            launch.detect_launch({"WORLD_SIZE": "2"})

    said = in_text(*through(call))
    assert "ValueError: the user's own" in said
    assert "LaunchError" in said


def test_the_first_line_of_an_error_of_ours_is_short() -> None:
    said = in_text(RankLostError(f"{'a' * 150}; {'b' * 100}", [1]), None)
    assert said.endswith(f"RankLostError: {'a' * 150};\n  {'b' * 100}\n")


def test_our_own_errors_are_not_chained_to_each_other() -> None:
    def call() -> None:
        try:
            raise TransportError("the first one")
        except TransportError as error:
            raise RankLostError("the second one", [1]) from error

    said = in_text(*through(call))
    assert "the second one" in said
    assert "the first one" not in said


@pytest.fixture
def run_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """Lets this process be a rank of a run."""
    monkeypatch.setattr(uncaught_errors, "private_folder", lambda _: tmp_path)
    monkeypatch.setattr(uncaught_errors, "run_began_s", lambda: 0.0)
    monkeypatch.setattr(uncaught_errors, "_VAGUE_S", 0.2)

    def be(rank: int) -> None:
        monkeypatch.setattr(liveness, "_run", liveness.Run("today", rank, 4, os.getpid()))

    return be


def test_one_rank_says_all_and_others_point_to_it(run_of: Callable[[int], None]) -> None:
    run_of(2)
    first = last_words("rank 2 of 4", "failed", *raised())
    assert first.is_all
    assert first.text.startswith("rank 2 of 4 failed:\nTraceback")
    run_of(0)
    error, trace = raised()
    second = last_words("rank 0 of 4", "failed", error, trace)
    assert not second.is_all
    assert second.text.startswith("rank 0 of 4 failed, too, at test_uncaught_errors.py:")
    assert second.text.endswith(": LaunchError; rank 2 failed first, and its traceback says why\n")


@pytest.mark.parametrize("knows", [True, False])
def test_a_rank_that_only_lost_a_connection_waits_for_one_that_knows_why(run_of: Callable[[int], None], knows: bool) -> None:
    run_of(0)
    with ThreadPoolExecutor(1) as threads:
        vague = threads.submit(last_words, "rank 0", "failed", TransportError("connection closed"), None)
        if knows:
            spoke_before("failed-today", 0.0, "rank 3", None)
    assert vague.result().is_all is not knows


def test_a_lock_that_nobody_gives_back_keeps_nobody_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncaught_errors, "_LOCK_S", 0.1)
    tmp_path.chmod(0o700)
    with (tmp_path / "spoken").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start_s = time.monotonic()
        assert is_first("this", time.time() - 1.0, tmp_path)
    assert time.monotonic() - start_s < 5.0


FAILING = "from syncline.collectives import init_process_group; init_process_group('nosuchbackend')"


def test_a_command_that_is_typed_twice_says_it_twice_and_briefly(tmp_path: Path) -> None:
    """By one parent, at once. What it leaves behind is one small file for all."""
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TMPDIR": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", FAILING], env=environ, capture_output=True, text=True, timeout=LIMIT_S)
        assert "UnknownBackendError: unknown backend 'nosuchbackend'" in done.stderr
        assert len(done.stderr.splitlines()) <= 6, done.stderr
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.iterdir()] == ["spoken"]


CAUGHT = """
import sys
from syncline.collectives import SynclineError, init_process_group
try:
    init_process_group("gloo")
except SynclineError as caught:
    failure = caught
raise {"init": failure, "own": FileNotFoundError("data.csv")}[sys.argv[1]]
"""


@pytest.mark.parametrize(("what", "tracebacks"), [("init", 1), ("own", 2)])
def test_only_the_failure_to_connect_is_shortened_and_leaves_a_line(what: str, tracebacks: int, tmp_path: Path) -> None:
    """Two processes of one parent end with the same text, but each error of the program's own is another one."""
    environ = {**os.environ, "WORLD_SIZE": "2", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", CAUGHT, what]
    processes = [
        subprocess.Popen(command, env={**environ, "RANK": rank}, stderr=subprocess.PIPE, text=True) for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    assert sum("Traceback" in text for text in said) == tracebacks, said
    for text in said:
        if "Traceback" not in text:
            assert f"LaunchError; a process with the same parent (pid {os.getpid()}) has printed this error in full" in text
            assert len(text.splitlines()) == 1


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stdout", [None, FullDisk()])
def test_last_words_are_said_although_the_output_is_broken(monkeypatch: pytest.MonkeyPatch, stdout: io.StringIO | None) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "__stderr__", stderr)
    say("rank 1 failed")
    assert stderr.getvalue() == "rank 1 failed\n"
    monkeypatch.setattr(sys, "__stderr__", FullDisk())
    say("nobody can read this, but it is no error")
