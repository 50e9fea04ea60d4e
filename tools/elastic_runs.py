"""Elastic training while ranks die: seeded runs of digits with four ranks. Two are killed, or one is stopped and continued.

Over Gloo there are also runs in which two newcomers join, at steps drawn from the seed, so that there are four ranks at the
end.

Each run is a job of `elastic_job.py`. Ranks are killed at moments drawn from the seed: in forward, backward, a collective,
between the agreement and the step, or while the others shrink. Another job trains the same without `Elastic` and kills, for all
runs: over groups of the ranks that took part in each step, and then once more with all four.

A run passes if every survivor finishes, if all have the same bits as the other job, if every rank has ended, and if no shared
memory is left. Over Open MPI a run also passes if its survivors finish but never leave MPI_Finalize. Then they are killed, and
the table counts them; their shared memory is not checked.
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mpi_runtimes
from commands import ROOT, ToolError
from environment import PYTHON

JOB = ROOT / "packages" / "ddp" / "tests" / "elastic_job.py"
WAYS = ("gloo", "ulfm")
RANKS, NEWCOMERS, EPOCHS, STEPS_IN_EPOCH = 4, 2, 5, 14
MOMENTS = (
    "forward",
    "backward",
    "before the collective",
    "in the collective",
    "before the agreement",
    "before the sum",
    "after the sum",
    "after the step",
)
DURING_SHRINK = ("shrink, before connecting", "shrink, after connecting", "before the model is updated")
WHILE_CONNECTING = "shrink, while connecting"  # over MPI this is between two collectives
PARTS = ("noticed", "agreed", "shrunk", "applied")
_ORDER = (*MOMENTS, *DURING_SHRINK, WHILE_CONNECTING)
_MARKS = {"rank lost": "noticed", "member ": "agreed", "went on with": "shrunk", "applied step": "applied"}
_LIMIT_S = 300.0  # a run that takes longer counts as hanging; on busy cores, a good run takes two minutes
# After two losses in a short time, Open MPI's survivors sometimes never leave MPI_Finalize: see the page on failures. The `mpi`
# backend ends them after 15 s. If all have finished and have not ended after this many seconds, the run is counted.
_FINALIZE_S = 20.0
_END_S = 5.0  # until the system has freed a killed process's resources

Kill = tuple[int, int, str]
"""Which rank, at which step, at which moment of it."""


@dataclass(frozen=True)
class Run:
    """One run: its backend and seed; whether a rank is stopped instead of two killed; whether newcomers join.

    Two kills may be given instead of drawn.
    """

    way: str
    seed: int
    stops: bool = False
    joins: bool = False
    given: tuple[Kill, ...] = ()
    epochs: int = EPOCHS

    @property
    def steps(self) -> int:
        """How many steps are applied."""
        return self.epochs * STEPS_IN_EPOCH

    @property
    def newcomers_at(self) -> list[int]:
        """The steps after which newcomers are let in; their numbers count on from `RANKS`."""
        return sorted(random.Random(-1 - self.seed).sample(range(self.steps - 1), NEWCOMERS)) if self.joins else []

    @property
    def starters(self) -> int:
        """How many processes the run has in all."""
        return RANKS + len(self.newcomers_at)

    @property
    def finishers(self) -> set[int]:
        """The numbers of the processes that end normally."""
        return set(range(self.starters)) - {rank for rank, _, _ in self.kills}

    @property
    def kills(self) -> list[Kill]:
        """Which ranks are lost, and when."""
        steps = self.steps - 1 if self.joins else self.steps  # with newcomers, all who finish must be in the last step
        if self.given:
            return list(self.given)
        drawn = draw_kills(random.Random(self.seed), RANKS, steps)
        return drawn[:1] if self.stops else drawn

    def plan(self) -> dict[str, object]:
        """The instructions for the job."""
        plan = {"data": "digits", "epochs": self.epochs, "seed": self.seed, "views": self.seed % 2 == 1, "kills": self.kills}
        plan |= {"ranks": RANKS, "newcomers_at": self.newcomers_at}
        return plan | ({"stops": True, "timeout_s": 5, "silence_timeout_s": 3} if self.stops else {})  # a stop is not announced


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        run: the run.
        problems: what is wrong, in words.
        digest: the digest of the survivors' final state.
        members: the ranks in each step; with newcomers, as reported by ranks that were in all steps.
        sizes: the number of ranks in each step.
        accuracy: the survivors' accuracy, in percent.
        undisturbed: the accuracy of the same training without a loss.
        recoveries: for each recovery of each survivor, the seconds from the loss to each event.
        has_ended: whether all processes ended by themselves.
    """

    run: Run
    problems: list[str] = field(default_factory=list)
    digest: str = ""
    members: list[list[int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    accuracy: float = float("nan")
    undisturbed: float = float("nan")
    recoveries: list[dict[str, float]] = field(default_factory=list)
    has_ended: bool = True


class _Job(NamedTuple):
    """The final state of each rank that finished, and whether all processes have ended."""

    results: dict[int, Any]
    has_ended: bool


def draw_kills(chosen: random.Random, ranks: int, steps: int) -> list[Kill]:
    """Two ranks and the moments of their deaths: the second in the shrink after the first, or at any later moment."""
    first, second = chosen.sample(range(ranks), 2)
    step = chosen.randrange(steps)
    if chosen.random() < 0.4:
        return [(first, step, chosen.choice(MOMENTS)), (second, step, chosen.choice(DURING_SHRINK))]
    return [(first, step, chosen.choice(MOMENTS)), (second, chosen.randrange(step, steps), chosen.choice(MOMENTS))]


def members_at_each_step(deaths: Sequence[Kill], sizes: Iterable[int], ranks: int) -> list[list[int]]:
    """The ranks in each applied step. A rank killed at step s, or in the shrink after it, may have been in step s."""
    left, members = list(range(ranks)), []
    order = [rank for rank, _, _ in sorted(deaths, key=lambda kill: (kill[1], _ORDER.index(kill[2])))]
    for size in sizes:
        while len(left) > size:
            left.remove(order.pop(0))
        members.append(list(left))
    return members


def recoveries(log: str, losses_s: Iterable[float]) -> list[dict[str, float]]:
    """For each recovery in a rank's log, the seconds from the loss to each event. A pure function.

    If a second rank was lost in the same recovery, times count from the first loss, and the last agreement counts.
    """
    found: list[dict[str, float]] = []
    losses, before_s = sorted(losses_s), 0.0
    for line in log.splitlines():
        when, _, words = line.partition(" ")
        part = next((part for mark, part in _MARKS.items() if words.startswith(mark)), None)
        if part == "noticed":
            lost_s = next((loss for loss in losses if before_s < loss <= float(when)), None)
            if lost_s is not None:
                found.append({"lost": lost_s})
        if part and found and "applied" not in found[-1] and (part != "applied" or "shrunk" in found[-1]):
            found[-1][part] = float(when)
            before_s = float(when)
    return [{part: each[part] - each["lost"] for part in PARTS} for each in found if set(PARTS) <= set(each)]


def play(run: Run) -> Outcome:
    """Play a run and judge it; the comparison comes later."""
    outcome, memory = Outcome(run), _shared_memory()
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        folder = Path(name) / "job"
        job = (run.way, folder, run.plan(), len(run.finishers))
        survived, outcome.has_ended = _job(*job, _LIMIT_S, outcome.problems, newcomers=len(run.newcomers_at))
        if not outcome.problems:
            _judge(survived, outcome)
        if run.stops and not any("have gone on without it" in path.read_text() for path in folder.glob("given-up-*")):
            outcome.problems.append("the rank that was stopped did not say that it was given up")
        losses = [json.loads(path.read_text())["when"] for path in folder.glob("hit-*")]
        there_from_the_start = [rank for rank in survived if rank < RANKS]  # a newcomer has not seen all losses
        logs = [(folder / f"log-{rank}").read_text() for rank in there_from_the_start]
        outcome.recoveries = [each for log in logs for each in recoveries(log, losses)]
    left = _left_behind(memory) if outcome.has_ended else []
    if left:
        outcome.problems.append(f"left in shared memory: {left}")
    return outcome


def _judge(survived: dict[int, Any], outcome: Outcome) -> None:
    if set(survived) != outcome.run.finishers:
        outcome.problems.append(f"the ranks {sorted(survived)} finished, and {sorted(outcome.run.finishers)} should have")
        return
    one = survived[min(survived)]
    outcome.digest, outcome.members, outcome.accuracy = one["digest"], one["members"], one["accuracy"]
    outcome.sizes = [len(those) for those in outcome.members]
    if len(outcome.members) != outcome.run.steps:
        outcome.problems.append(f"{len(outcome.members)} steps were applied, not {outcome.run.steps}")
    for rank, its in survived.items():
        if its["digest"] != outcome.digest or its["members"] != outcome.members[its["began_at"] :]:
            outcome.problems.append(f"rank {rank} differs from rank {min(survived)}")
    if outcome.run.joins and set(outcome.members[-1]) != outcome.run.finishers:
        outcome.problems.append(f"the last step was taken by {outcome.members[-1]}")


def compare(outcomes: Sequence[Outcome]) -> None:
    """Train as in these runs, all over one backend, without a loss, in one job. A difference is a problem of the run."""
    members = [
        outcome.members if outcome.run.joins else members_at_each_step(outcome.run.kills, outcome.sizes, RANKS)
        for outcome in outcomes
    ]
    plans = [{**outcome.run.plan(), "members": those} for outcome, those in zip(outcomes, members, strict=True)]
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        limit_s = _LIMIT_S + 20 * len(plans)
        ranks = max(outcome.run.starters for outcome in outcomes)
        expected, _ = _job(outcomes[0].run.way, Path(name) / "job", {"plans": plans}, ranks, limit_s, problems, ranks=ranks)
    for number, (outcome, those) in enumerate(zip(outcomes, members, strict=True)):
        outcome.problems += problems
        if problems:
            continue
        same = expected[those[-1][0]][number]
        outcome.undisturbed = same["undisturbed"]
        if same["digest"] != outcome.digest:
            outcome.problems.append("the survivors differ from a training without losses")


def _job(
    way: str,
    folder: Path,
    plan: dict[str, object],
    finishers: int,
    limit_s: float,
    problems: list[str],
    *,
    ranks: int = RANKS,
    newcomers: int = 0,
) -> _Job:
    """Start the ranks, and wait until all have ended; for Open MPI see `_FINALIZE_S`."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    with (folder / "output").open("w") as output, _processes(way, folder, output, ranks, newcomers) as processes:
        end_s, has_ended = time.monotonic() + limit_s, False
        while not has_ended and time.monotonic() < end_s:
            time.sleep(0.05)
            has_ended = all(process.poll() is not None for process in processes)
            if way == "ulfm" and len(list(folder.glob("result-*.json"))) == finishers:
                end_s = min(end_s, time.monotonic() + _FINALIZE_S)
        left = _processes_of(folder) if has_ended else _pids_of(folder)
    for pid in _pids_of(folder):  # Open MPI's ranks are not in its launcher's process group
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    results = {int(path.stem[7:]): json.loads(path.read_text()) for path in folder.glob("result-*.json")}
    if left and (way != "ulfm" or len(results) < finishers):
        problems.append(f"processes are left: {left}")
    if problems or len(results) < finishers:
        problems.append(f"ranks {sorted(results)} finished. {(folder / 'output').read_text(errors='replace')[-4000:]}")
    return _Job(results, has_ended)


@contextmanager
def _processes(way: str, folder: Path, output: object, ranks: int, newcomers: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    if way == "gloo":
        commands = [[str(PYTHON), str(JOB), str(rank), str(ranks), str(folder)] for rank in range(ranks)]
        commands += [[str(PYTHON), str(JOB), "join", str(ranks + number), str(folder)] for number in range(newcomers)]
    else:
        runtime = mpi_runtimes.find("openmpi")
        environ |= runtime.env
        mpiexec, *words = runtime.command(RANKS)
        commands = [[mpiexec, "--with-ft", "ulfm", *words, str(PYTHON), str(JOB), "mpi", str(folder)]]
    started = [
        subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environ, start_new_session=True)  # type: ignore[call-overload]
        for words in commands
    ]
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _processes_of(folder: Path) -> list[int]:
    """The running processes that were started with this folder."""
    end = time.monotonic() + _END_S
    while (left := _pids_of(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def _pids_of(folder: Path) -> list[int]:
    return [pid for pid in _pids() if str(folder).encode() in _read(pid, "cmdline")]


def _shared_memory() -> set[str]:
    """Names in shared memory, without those of runs over MPICH: other programs may use this machine, but not these runs."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("mpich")}


def _left_behind(before: set[str]) -> list[str]:
    """New names in shared memory that no process maps. Others may belong to other programs of this machine."""
    end = time.monotonic() + _END_S
    while left := _unused(_shared_memory() - before):
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    return left


def _unused(names: set[str]) -> list[str]:
    mapped = b"".join(_read(pid, "maps") for pid in _pids()) if names else b""
    return sorted(name for name in names & _shared_memory() if f"/dev/shm/{name}".encode() not in mapped)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""  # the process has ended, or belongs to another user


def table(outcomes: Sequence[Outcome]) -> str:
    """For each backend: the number of runs, the accuracies, and the seconds from a loss to each part of the recovery."""
    lines = []
    for way in WAYS:
        mine = [outcome for outcome in outcomes if outcome.run.way == way and not outcome.run.stops]
        if not mine:
            continue
        joined = sum(outcome.run.joins for outcome in mine)
        lines += [f"{way}: in {joined} of {len(mine)} runs newcomers came"] if joined else []
        good = [outcome for outcome in mine if not outcome.problems]
        hanging = sum(not outcome.has_ended for outcome in mine)
        lines.append(f"{way}: {len(good)} of {len(mine)} runs passed; in {hanging} MPI did not end")
        if good:
            pairs = [(outcome.accuracy, outcome.undisturbed) for outcome in good]
            here, there = (statistics.mean(column) for column in zip(*pairs, strict=True))
            largest = max(abs(one - other) for one, other in pairs)
            lines.append(f"accuracy: mean {here:.2f} %, undisturbed {there:.2f} %; largest difference of a seed {largest:.2f}")
        lines += [f"{'seconds after the loss':24} {'of':>4} {'median':>8} {'largest':>8}"]
        for part in PARTS:
            seconds = [each[part] for outcome in good for each in outcome.recoveries]
            if seconds:
                lines.append(f"{part:24} {len(seconds):4} {statistics.median(seconds):8.2f} {max(seconds):8.2f}")
    return "\n".join(lines)


def elastic(runs: int, stops: int, joins: int, ways: Sequence[str], seed: int) -> bool:
    """Play all runs, print a line for each and the table; returns whether all passed.

    Raises:
        ToolError: there is nothing to play.
    """
    if not runs and not ((stops or joins) and "gloo" in ways):
        raise ToolError(
            "nothing to play: give --runs, or --stops or --joins over gloo (over ULFM nobody is given up who is only silent, "
            "and nobody comes later)"
        )
    outcomes = []
    for way in ways:
        wanted = [Run(way, seed + number) for number in range(runs)]
        wanted += [Run(way, seed + number, stops=True) for number in range(stops if way == "gloo" else 0)]
        wanted += [Run(way, seed + number, joins=True) for number in range(joins if way == "gloo" else 0)]
        outcomes += _played(wanted)
    print(table(outcomes), flush=True)
    return not any(outcome.problems for outcome in outcomes)


def _played(runs: Sequence[Run]) -> list[Outcome]:
    outcomes = []
    for run in runs:
        outcomes.append(play(run))
        times = " ".join(f"{each['applied']:.2f}" for each in outcomes[-1].recoveries)
        print(
            f"{'FAIL' if outcomes[-1].problems else 'ok  '} {run} {run.kills}: applied a step again after {times} s", flush=True
        )
        for problem in outcomes[-1].problems:
            print(problem, file=sys.stderr, flush=True)
    good = [outcome for outcome in outcomes if not outcome.problems]
    if good:
        compare(good)
    for outcome in good:
        words = "; ".join(outcome.problems) or "the same bits as without losses"
        print(f"{outcome.run}: accuracy {outcome.accuracy:.2f} %, undisturbed {outcome.undisturbed:.2f} %; {words}", flush=True)
    return outcomes
