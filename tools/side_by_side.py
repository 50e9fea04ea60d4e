"""Runs commands side by side, a few at a time. A command's output is shown in one piece, when it ends."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from commands import ROOT, end, show, signals_later, start

POLL_S = 0.05


@dataclass(frozen=True)
class Job:
    """A command with a name; `env` adds to ours."""

    name: str
    command: tuple[str | Path, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 2400.0


@dataclass(frozen=True)
class Ended:
    """The result of a job: its status, its seconds, and how many cores it used on average, with its children."""

    name: str
    status: int
    taken_s: float
    processor_s: float = 0.0


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_side_by_side(jobs: Sequence[Job], width: int) -> list[Ended]:
    """Run all jobs in this order, `width` at a time. A failure stops no other job."""
    waiting, running, ended = deque(jobs), list[_Running](), list[Ended]()
    try:
        while waiting or running:
            while waiting and len(running) < width:
                with signals_later():
                    running.append(_Running(waiting.popleft()))
            time.sleep(POLL_S)
            for one in [one for one in running if one.is_over()]:
                running.remove(one)
                ended.append(one.tell())
    finally:
        for one in running:
            one.give_up()
    return ended


class _Running:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._said: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, closed in tell
        self._start_s = time.monotonic()
        self._timed_out = False
        self._processor_s = 0.0
        self.process = start(job.command, cwd=ROOT, env=job.env, output=self._said)

    def is_over(self) -> bool:
        """Whether the job has ended; after its time limit it is killed."""
        before_s = _children_processor_s()
        over = self._has_ended()
        self._processor_s += _children_processor_s() - before_s  # only this child was waited for in between, so only it counts
        return over

    def _has_ended(self) -> bool:
        if self.process.poll() is None and time.monotonic() - self._start_s > self._job.timeout_s:
            self._timed_out = True
            end(self.process)
        return self.process.poll() is not None

    def give_up(self) -> None:
        end(self.process)
        self._said.close()

    def tell(self) -> Ended:
        taken_s = time.monotonic() - self._start_s
        print(f"\n=== {self._job.name} ({taken_s:.0f} s) ===")
        show(self._job.command)
        self._said.seek(0)
        print(self._said.read().strip())
        self._said.close()
        if self._timed_out:
            print(f"{self._job.name} did not end within {self._job.timeout_s:g} s, and was ended")
        print(end="", flush=True)
        return Ended(self._job.name, 124 if self._timed_out else self.process.returncode, taken_s, self._processor_s)


def _children_processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
