"""The chaos test: random ranks are killed, stopped or late. No rank may hang, and every error must name the victim.

Each run is one job (see `test_support/chaos_job.py`), on Gloo, MPICH, Open MPI, or Open MPI with ULFM, with three or four
ranks. A run passes if the job ends within the time-out and a few seconds, and if every survivor's error, or the output of
launcher or watchdog, names the victim. A late rank is no failure: then no rank may raise an error.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mpi_runtimes
from commands import ROOT, TOOLS_ON_PATH
from environment import PYTHON

JOB = ROOT / "tools" / "test_support" / "chaos_job.py"
WAYS = ("gloo", "mpich", "openmpi", "ulfm")
_START_S = 60.0
# If a direct child of Hydra is ended by a signal, Hydra kills all ranks of the node, with any options. A shell in between ends
# with a status instead. Then Hydra sends SIGUSR1 to the others, which their shells must ignore. See the page on failures.
_OUTLIVE_HYDRA = ["sh", "-c", 'trap "" USR1; "$@"; exit $?', "sh"]
_LIMIT_S = 14.0  # from the hit: the time-out of 6 s, 3 s more, and the end of the job


@dataclass(frozen=True)
class Run:
    """One job: its backend, number of ranks, the fate of the victim, and the seed."""

    way: str
    ranks: int
    what: str
    seed: int

    @property
    def victim(self) -> int:
        return random.Random(self.seed).randrange(self.ranks)


@dataclass(frozen=True)
class Outcome:
    """The result of a run; `seconds` until each survivor's error."""

    run: Run
    hung: bool
    named: bool
    seconds: Sequence[float]
    words: str

    @property
    def passed(self) -> bool:
        return self.named and not self.hung


def plan(kills: int, stops: int, delays: int, ways: Sequence[str], seed: int) -> Iterator[Run]:
    """The runs: spread evenly over the ways, with three and four ranks in turn."""
    for what, count in (("kill", kills), ("stop", stops), ("delay", delays)):
        for number in range(count):
            yield Run(ways[number % len(ways)], 3 + number // len(ways) % 2, what, seed + number)


def play(run: Run, limit_s: float = _LIMIT_S) -> Outcome:
    """Start a job, and judge its result. The job must end within `limit_s` seconds of the hit. A busy machine needs more."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        with (folder / "output").open("w") as output:
            jobs = _start(run, folder, output)
            try:
                hung = not _ends(run, folder, jobs, limit_s)
            finally:
                _kill(folder, jobs)
        return _judge(run, folder, hung)


def _start(run: Run, folder: Path, output: object) -> list[subprocess.Popen[bytes]]:
    backend = "gloo" if run.way == "gloo" else "mpi"
    program = [str(PYTHON), str(JOB), backend, str(folder), str(run.seed), run.what]
    environ = {**os.environ, **TOOLS_ON_PATH, "OMP_NUM_THREADS": "1", "SYNCLINE_REPORT_DIR": str(folder)}
    commands = []
    if backend == "gloo":
        commands = [(program, {"CHAOS_RANK": str(rank), "CHAOS_SIZE": str(run.ranks)}) for rank in range(run.ranks)]
    else:
        runtime = mpi_runtimes.find("mpich" if run.way == "mpich" else "openmpi")
        extra = {"mpich": ["-disable-auto-cleanup"], "openmpi": [], "ulfm": ["--with-ft", "ulfm"]}[run.way]
        words = list(runtime.command(run.ranks))
        guard = _OUTLIVE_HYDRA if run.way == "mpich" else []
        commands = [([words[0], *extra, *words[1:], *guard, *program], runtime.env)]
    return [
        subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env={**environ, **more}, start_new_session=True)  # type: ignore[call-overload]
        for words, more in commands
    ]


def _ends(run: Run, folder: Path, jobs: Sequence[subprocess.Popen[bytes]], limit_s: float) -> bool:
    """Wait for the survivors, or for the end of the job; returns whether they were in time."""
    survivors = [folder / f"seen-{rank}" for rank in range(run.ranks) if rank != run.victim or run.what == "delay"]
    started = time.time()
    while time.time() < _hit(folder, started) + limit_s:
        if all(seen.exists() for seen in survivors) or all(job.poll() is not None for job in jobs):
            return True
        time.sleep(0.05)
    return False


def _hit(folder: Path, started: float) -> float:
    """When the victim was hit. Before the hit: the latest moment at which it will be."""
    try:
        return float(json.loads((folder / "victim").read_text())["when"])
    except (OSError, ValueError):
        return started + _START_S


def _kill(folder: Path, jobs: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what is left: first the stopped victim, then everything."""
    try:
        os.kill(json.loads((folder / "victim").read_text())["pid"], signal.SIGKILL)
    except (OSError, ValueError):
        pass
    end = time.monotonic() + 3.0
    while any(job.poll() is None for job in jobs) and time.monotonic() < end:
        time.sleep(0.05)
    for job in jobs:
        try:
            os.killpg(job.pid, signal.SIGKILL)
        except OSError:
            pass
        job.wait()


def _judge(run: Run, folder: Path, hung: bool) -> Outcome:
    printed = (folder / "output").read_text(errors="replace")
    seen = [json.loads(path.read_text()) for path in sorted(folder.glob("seen-*")) if path.name != f"seen-{run.victim}"]
    if run.what == "delay":
        failed = [str(entry) for entry in seen if entry["error"]]
        return Outcome(run, hung, len(seen) == run.ranks - 1 and not failed, (), printed[-2000:] + "\n".join(failed))
    when = _hit(folder, 0.0)
    seconds = [entry["when"] - when for entry in seen if entry["error"]]
    unnamed = [entry for entry in seen if not _names(run, entry.get("words") or "", entry.get("ranks") or ())]
    is_complete = len(seen) == run.ranks - 1
    named = not unnamed and (is_complete or _names(run, printed, ()))
    return Outcome(run, hung, named, seconds, "\n".join([*map(str, unnamed), printed[-2000:]]))


def _names(run: Run, words: str, ranks: Sequence[int]) -> bool:
    marks = (f"rank {run.victim}", f"rank(s) {run.victim} ", f"RANK {run.victim}", f"rank(s) {run.victim},")
    return run.victim in ranks or any(mark in words for mark in marks)


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each way and kind."""
    lines = [f"{'over':8} {'what':6} {'runs':>4} {'hangs':>5} {'unnamed':>7} {'median s':>8} {'max s':>6}"]
    for way in WAYS:
        for what in ("kill", "stop", "delay"):
            mine = [outcome for outcome in outcomes if (outcome.run.way, outcome.run.what) == (way, what)]
            seconds = [second for outcome in mine for second in outcome.seconds]
            if mine:
                hangs, unnamed = sum(o.hung for o in mine), sum(not o.named for o in mine)
                times = f"{statistics.median(seconds):8.2f} {max(seconds):6.2f}" if seconds else f"{'-':>8} {'-':>6}"
                lines.append(f"{way:8} {what:6} {len(mine):4} {hangs:5} {unnamed:7} {times}")
    return "\n".join(lines)


def chaos(kills: int, stops: int, delays: int, ways: Sequence[str], seed: int) -> bool:
    """Play all runs, print a line for each and the table; returns whether all passed."""
    outcomes = []
    for run in plan(kills, stops, delays, ways, seed):
        outcome = play(run)
        outcomes.append(outcome)
        seconds = " ".join(f"{second:.2f}" for second in outcome.seconds)
        print(f"{'ok  ' if outcome.passed else 'FAIL'} {run} victim {run.victim}: {seconds}", flush=True)
        if not outcome.passed:
            print(outcome.words, file=sys.stderr, flush=True)
    print(table(outcomes), flush=True)
    return all(outcome.passed for outcome in outcomes)
