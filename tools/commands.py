"""Running commands: each is shown in one dim line before it starts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent

TOOLS_ON_PATH = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "tools"), os.environ.get("PYTHONPATH"))))}
"""For programs that import `test_support` or `benchmarks`."""

GRACE_S = 10.0


class ToolError(Exception):
    """An error that the user at the keyboard can fix; shown without a traceback."""


@dataclass(frozen=True)
class Outcome:
    """The result of a captured command: exit status, both streams as one text, and whether it hung."""

    status: int
    output: str
    timed_out: bool = False


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run `command` in the foreground and return its exit status; `env` adds to ours."""
    show(command)
    return subprocess.run([str(word) for word in command], cwd=cwd, env=merged(env)).returncode


def check(command: Sequence[str | Path], *, remedy: str = "see the output above", env: Mapping[str, str] | None = None) -> None:
    """Run `command` and raise ToolError with the remedy if it fails; `env` adds to ours."""
    status = run(command, env=env)
    if status != 0:
        raise ToolError(f"`{_shortened(command)}` failed with status {status}; {remedy}")


def capture(command: Sequence[str | Path], *, timeout_s: float, cwd: Path, env: Mapping[str, str]) -> Outcome:
    """Run `command`, keep its output, and end it with all its children after `timeout_s`."""
    show(command)
    with _started(command, cwd, env, subprocess.PIPE) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
            return Outcome(process.returncode, output)
        except subprocess.TimeoutExpired:
            return Outcome(124, end(process), timed_out=True)


def follow(
    command: Sequence[str | Path], *, timeout_s: float, cwd: Path, env: Mapping[str, str], log: Path | None = None
) -> Outcome:
    """Run `command` without keeping its output: it is shown at once, or goes to a file, also if this process is killed."""
    if log is None:
        show(command)
    with nullcontext() if log is None else log.open("a") as output, _started(command, cwd, env, output) as process:
        try:
            return Outcome(process.wait(timeout_s), "")
        except subprocess.TimeoutExpired:
            end(process)
            return Outcome(124, "", timed_out=True)


@contextmanager
def _started(
    command: Sequence[str | Path], cwd: Path, env: Mapping[str, str], output: IO[str] | int | None
) -> Iterator[subprocess.Popen[str]]:
    """The process, in a session of its own. If the block raises an exception, the process is ended with all its children."""
    process = None
    try:
        with signals_later():
            process = start(command, cwd=cwd, env=env, output=output)
        yield process
    except BaseException:
        if process is not None:
            end(process)
        raise


@contextmanager
def signals_later() -> Iterator[None]:
    """Handle SIGINT and SIGTERM only after the block: an exception within Popen would lose the process that it has started."""
    came = list[int]()
    before = {
        number: signal.signal(number, lambda number, _: came.append(number)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for arrived in came:
            signal.raise_signal(arrived)


def start(
    command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str], output: IO[str] | int | None
) -> subprocess.Popen[str]:
    """Start `command` in a session of its own, with both streams into `output` (None: they are shown)."""
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=merged(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> str:
    """Ask the process to end first, so that mpiexec can end ranks in their own process groups; then kill it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
        try:
            return process.communicate(timeout=GRACE_S)[0] or ""
        except subprocess.TimeoutExpired as hung:
            kept = hung.output
    return kept.decode(errors="replace") if isinstance(kept, bytes) else kept or ""


def merged(env: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, **(env or {})}


def show(command: Sequence[str | Path]) -> None:
    line = f"$ {_shortened(command)}"
    print(f"\033[2m{line}\033[0m" if sys.stdout.isatty() else line, flush=True)


def _shortened(command: Sequence[str | Path]) -> str:
    return shlex.join(str(word) for word in command).replace(f"{ROOT}{os.sep}", "")
