"""Running commands: each is shown in one dim line before it starts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

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
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=merged(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return Outcome(process.returncode, output)
    except subprocess.TimeoutExpired:
        return Outcome(124, end(process), timed_out=True)
    except BaseException:
        end(process)
        raise


def follow(
    command: Sequence[str | Path], *, timeout_s: float, cwd: Path, env: Mapping[str, str], log: Path | None = None
) -> Outcome:
    """Run `command` without keeping its output: it is shown at once, or goes to a file, also if this process is killed."""
    if log is None:
        show(command)
    with nullcontext() if log is None else log.open("a") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd,
            env=merged(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if log is None else subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            return Outcome(process.wait(timeout_s), "")
        except subprocess.TimeoutExpired:
            end(process)
            return Outcome(124, "", timed_out=True)
        except BaseException:
            end(process)
            raise


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
