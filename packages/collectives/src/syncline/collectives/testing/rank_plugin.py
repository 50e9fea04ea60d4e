"""The part of the pytest plugin `pytest_plugin` that runs only under mpirun."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

import pytest
from _pytest.terminal import TerminalReporter  # pytest exports this class only since version 9

from ..engine.cancel_scope import CancelScope
from ..group import ProcessGroup
from ..startup.mpi_library import abort_job

if TYPE_CHECKING:
    from mpi4py import MPI


T = TypeVar("T")


class Agreement:
    """Exchanges small objects between all ranks. It uses mpi4py, because tests may break Syncline's collectives."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._communicator = MPI.COMM_WORLD.Dup()
        self.rank = self._communicator.Get_rank()
        self.size = self._communicator.Get_size()

    def exchange(self, value: Any, scope: CancelScope) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks. All ranks must call this method.

        Raises:
            TimeoutError: not all ranks called this method in time. The caller must end the job.
        """
        payload = pickle.dumps(value)
        lengths = bytearray(8 * self.size)
        self._wait(lambda: self._communicator.Iallgather(len(payload).to_bytes(8, "little"), lengths), scope)
        counts = [int.from_bytes(lengths[8 * rank : 8 * rank + 8], "little") for rank in range(self.size)]
        starts = [sum(counts[:rank]) for rank in range(self.size)]
        payloads = bytearray(sum(counts))
        self._wait(lambda: self._communicator.Iallgatherv(payload, _gathered(payloads, counts, starts)), scope)
        return [pickle.loads(payloads[start : start + count]) for start, count in zip(starts, counts, strict=True)]

    def end_job(self) -> None:
        """End all ranks of the MPI job."""
        abort_job(1)

    @staticmethod
    def _wait(start: Callable[[], MPI.Request], scope: CancelScope) -> None:
        request = start()
        pause_s = 1e-5
        while not request.Test():
            if scope.is_over():
                raise TimeoutError
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.001)


def _gathered(payloads: bytearray, counts: list[int], starts: list[int]) -> Any:
    from mpi4py import MPI

    return payloads, (counts, starts), MPI.BYTE


# A rank that has finished a test waits for the others this much longer than a test may take. So a rank that hangs in the test
# reaches its time limit earlier, and prints its stacks.
_LONGER_S = 3.0


@dataclass(frozen=True)
class RankOutcome:
    """The outcome of one phase of a test on one rank.

    Attributes:
        place: the phase and the test, such as "call of test_a.py::test_b".
        outcome: "passed", "failed" or "skipped".
        text: pytest's report as text if the phase did not pass; else empty.
    """

    place: str
    outcome: str
    text: str = ""


def combined(rank_outcomes: list[RankOutcome]) -> str | None:
    """Return the error message for all ranks, from the outcomes of one phase of a test on each rank.

    If all ranks passed the phase, or all ranks skipped the phase, there is no error: return None.
    """
    outcomes = {rank_outcome.outcome for rank_outcome in rank_outcomes}
    if len(outcomes) == 1 and "failed" not in outcomes:
        return None
    if "failed" not in outcomes:
        lines = [
            f"rank {rank}: {rank_outcome.outcome} {rank_outcome.text}".rstrip()
            for rank, rank_outcome in enumerate(rank_outcomes)
        ]
        return "the ranks did not do the same:\n" + "\n".join(lines)
    failed = [rank for rank, rank_outcome in enumerate(rank_outcomes) if rank_outcome.outcome == "failed"]
    blocks = [f"---- rank {rank} of {len(rank_outcomes)} ----\n{rank_outcomes[rank].text}" for rank in failed]
    return f"failed on rank(s) {', '.join(map(str, failed))} of {len(rank_outcomes)}\n" + "\n".join(blocks)


class RankPlugin:
    """The plugin object that pytest gets on every rank of an MPI job.

    Args:
        config: pytest's configuration.
        limit_s: the time limit of one test on one rank, in seconds.
        patience_s: how many seconds a rank waits for the other ranks after a failed test. At the end of the session, it also
            waits for collectives in flight.
    """

    def __init__(self, config: pytest.Config, limit_s: float, patience_s: float) -> None:
        self._agreement = Agreement()
        self._who = f"[rank {self._agreement.rank} of {self._agreement.size}]"
        self._limit_s = limit_s
        self._patience_s = patience_s
        self._stderr = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)
        self._watchdog = Watchdog(self._who, self._stderr, self._agreement.end_job)
        self._group: ProcessGroup | None = None
        self._collection_errors: list[str] = []
        self._failure_at_close: str | None = None
        self._silent_output: TextIO | None = None
        if self._agreement.rank != 0:
            self._silence(config)

    # ---- what the fixtures use ----

    @property
    def collective_limit_s(self) -> float:
        """The time limit of one collective, in seconds. A collective fails before the time limit of its test."""
        return self._limit_s / 2

    def group(self, connect: Callable[[], ProcessGroup]) -> ProcessGroup:
        """Return the group that the tests share. At the first use and after a failed test, make the group with `connect`."""
        if self._group is None:
            self._group = connect()
        return self._group

    # ---- hooks ----

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note errors that pytest found while collecting tests. Ranks above 0 print nothing, so rank 0 prints their errors."""
        if report.failed:
            self._collection_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Check that all ranks collected the same tests."""
        mine = (tuple(item.nodeid for item in session.items), tuple(self._collection_errors))
        everyone = self._exchange(mine, "collection", self._limit_s)
        # Compare only the number of errors: their texts may contain addresses.
        if len({(ids, len(errors)) for ids, errors in everyone}) > 1:
            counts = ", ".join(f"rank {rank}: {len(ids)}" for rank, (ids, _) in enumerate(everyone))
            problem = f"the ranks collected different tests ({counts}), or with different errors"
            outcomes = [
                RankOutcome("collection", "failed" if errors else "passed", "\n".join(errors)) for _, errors in everyone
            ]
            words = combined(outcomes)
            # pytest prints this error on every rank, so only the error of rank 0 has the details.
            raise pytest.UsageError(problem if words is None or self._agreement.rank != 0 else f"{problem}\n{words}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run each test under the watchdog."""
        self._watchdog.arm(item.nodeid, self._limit_s)
        try:
            return (yield)
        finally:
            self._watchdog.disarm()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Make a phase of a test (setup, call, teardown) fail on all ranks if it fails on one, or if the outcomes differ."""
        report = yield
        mine = RankOutcome(f"{report.when} of {item.nodeid}", report.outcome, "" if report.passed else _text(report))
        rank_outcomes = self._agree(mine)
        self._watchdog.arm(item.nodeid, self._limit_s)  # for the next phase
        words = combined(rank_outcomes)
        if words is not None:
            self._discard_group()
            if self._agreement.size > 1:
                report.outcome, report.longrepr, report.sections = "failed", words, []
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Close the group, and give every rank the highest exit status of all ranks.

        If closing fails, the session fails: a call of a test has failed, and the test has not waited for the call.
        """
        status, words = int(exitstatus), ""
        if self._group is not None:
            try:
                self._group.close()
            except Exception as error:  # noqa: BLE001 - the other ranks wait for this rank below
                status, words = max(status, int(pytest.ExitCode.TESTS_FAILED)), f"{type(error).__name__}: {error}"
        # If this rank has not called a collective that is in flight on another rank, that rank closes only when the collective
        # has reached its time limit. Then that rank knows the error.
        said = self._exchange((status, words), "the end of the session", self.collective_limit_s + self._patience_s)
        session.exitstatus = max(status for status, _ in said)
        outcomes = [RankOutcome("close", "failed" if words else "passed", words) for _, words in said]
        self._failure_at_close = combined(outcomes)
        if self._silent_output is not None:
            self._silent_output.flush()

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        """Print the errors of calls in `mpi_group` that no test has waited for."""
        if self._failure_at_close is not None:
            terminalreporter.section("mpi_group: calls that no test waited for", sep="=", red=True)
            terminalreporter.write_line(self._failure_at_close)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Wait until rank 0 has printed its summary, because the launcher ends the job when a rank exits with a failure."""
        self._exchange(None, "the exit", self._patience_s)

    # ---- agreeing ----

    def _agree(self, mine: RankOutcome) -> list[RankOutcome]:
        self._watchdog.arm(f"{mine.place}, now waiting for the other ranks,", self._limit_s + _LONGER_S)
        patience_s = self._patience_s if mine.outcome == "failed" else self._limit_s + 2 * _LONGER_S
        return self._exchange(mine, mine.place, patience_s, f"{mine.outcome} here\n{mine.text}".rstrip())

    def _exchange(self, value: T, place: str, patience_s: float, words: str = "") -> list[T]:
        """Return the values of all ranks.

        If a rank does not call this method within `patience_s` seconds, or calls it with another `place`, end the job.
        """
        try:
            everyone: list[tuple[str, T]] = self._agreement.exchange((place, value), CancelScope(patience_s))
        except TimeoutError:
            self._give_up(
                f"{patience_s:g} s after this rank, not all others have come to: {place}; they may be waiting for it in a "
                f"collective. {words}"
            )
        places = [their_place for their_place, _ in everyone]
        if len(set(places)) > 1:
            found = "; ".join(f"rank {rank}: {there}" for rank, there in enumerate(places))
            self._give_up(f"the ranks are out of step ({found}). {words}")
        return [their_value for _, their_value in everyone]

    def _give_up(self, why: str) -> NoReturn:
        os.write(self._stderr, f"\n{self._who} {why}\n{self._who} ends the job\n".encode())
        self._agreement.end_job()
        os._exit(1)

    # ---- helpers ----

    def _discard_group(self) -> None:
        if self._group is not None:
            # Ranks may have left collectives unfinished.
            self._group.abort()
            self._group = None

    def _silence(self, config: pytest.Config) -> None:
        config.pluginmanager.unregister(name="terminalreporter")
        self._silent_output = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the session
        # Without a reporter, some plugins would fail.
        config.pluginmanager.register(TerminalReporter(config, self._silent_output), "terminalreporter")


def _text(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        path, line, reason = report.longrepr
        return f"{path}:{line}: {reason}"
    sections = [f"{name}:\n{content}" for name, content in report.sections]
    return "\n".join([report.longreprtext, *sections])


# When a test hangs, all ranks reach its time limit at about the same time. After a rank has printed its stacks, it waits this
# long, so that the other ranks can print their stacks before the job ends.
_OTHERS_S = 1.0
# If C code never releases the GIL, the timer's thread cannot run. faulthandler's thread needs no GIL, and ends the process.
_LAST_RESORT_S = 5.0


class Watchdog:
    """At a time limit, prints the stacks of this rank's threads and ends the job.

    Args:
        who: the name of this rank, for messages.
        stderr: a file descriptor that pytest does not capture.
        end_job: ends all ranks.
    """

    def __init__(self, who: str, stderr: int, end_job: Callable[[], None]) -> None:
        self._who = who
        self._stderr = stderr
        self._end_job = end_job
        self._timer: threading.Timer | None = None

    def arm(self, what: str, limit_s: float) -> None:
        """Start the clock again. The step that `what` names may take `limit_s` seconds from now."""
        self.disarm()
        self._timer = threading.Timer(limit_s, self._on_time_up, (what, limit_s))
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(limit_s + _LAST_RESORT_S, exit=True, file=self._stderr)

    def disarm(self) -> None:
        """Stop the clock."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time_up(self, what: str, limit_s: float) -> None:
        os.write(self._stderr, f"\n{self._who}: {what} took more than {limit_s:g} s; all threads of this rank:\n".encode())
        faulthandler.dump_traceback(self._stderr, all_threads=True)
        threading.Event().wait(_OTHERS_S)
        self._end_job()
