"""What the watchdog does about calls that do not end."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest

from syncline.collectives import RankLostError, TransportError
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.health.monitor import END_LOOKS, INTERRUPT_LOOKS, NOTICED_LOOKS, Step


class Group:
    """A group whose call sits in a library."""

    def __init__(self, scope: CancelScope, reason: TransportError | None = None) -> None:
        self.running_deadline: CancelScope | None = deadline
        self.reason = reason
        self.interrupted = threading.Event()
        self.reported: list[str] = []

    def reason_to_give_up(self) -> TransportError | None:
        return self.reason

    def interrupt(self) -> None:
        self.interrupted.set()

    def missing_in_words(self) -> str:
        return "it waits for rank 1"

    def report(self, reason: str) -> None:
        self.reported.append(reason)


def steps(escalation: CallEscalation, next_deadline: Callable[[], CancelScope | None], looks: int) -> list[Step]:
    return [escalation.look(next_deadline()) for _ in range(looks)]


def test_a_call_that_has_time_is_left_alone() -> None:
    deadline = CancelScope(100.0)
    assert set(steps(CallEscalation(), lambda: deadline, 50)) == {Step.NOTHING}


def test_short_calls_are_left_alone() -> None:
    kept = [CancelScope(1e-9) for _ in range(50)]
    assert set(steps(CallEscalation(), kept.pop, 50)) == {Step.NOTHING}
    assert set(steps(CallEscalation(), lambda: None, 50)) == {Step.NOTHING}


def test_a_call_that_nobody_ends_is_interrupted_and_then_the_process_ends() -> None:
    deadline = CancelScope(1e-9)
    found = steps(CallEscalation(), lambda: deadline, 1 + END_LOOKS)
    assert found.index(Step.INTERRUPT) == INTERRUPT_LOOKS
    assert found.index(Step.END) == END_LOOKS
    assert found.count(Step.NOTHING) == len(found) - 2


def test_a_thread_that_has_noticed_ends_its_call_itself() -> None:
    deadline = CancelScope(1e-9)
    assert deadline.expired()
    assert set(steps(CallEscalation(), lambda: deadline, 50)) == {Step.NOTHING}


def test_a_thread_that_has_noticed_and_does_not_come_back_ends_with_the_process() -> None:
    deadline = CancelScope(1e-9)
    assert deadline.expired()
    found = steps(CallEscalation(), lambda: deadline, 2 * NOTICED_LOOKS)
    assert found.index(Step.INTERRUPT) == NOTICED_LOOKS // 2
    assert found.index(Step.END) == NOTICED_LOOKS
    assert found.count(Step.NOTHING) == len(found) - 2


def test_a_lost_rank_cancels_the_call_that_runs() -> None:
    deadline = CancelScope(100.0)
    group = Group(deadline, RankLostError("rank 1 ended", [1]))
    watchdog = Watchdog(lambda words: None)
    watchdog.watch(group)
    watchdog.look()
    assert not deadline.was_cancelled  # it has just begun
    watchdog.look()
    assert deadline.was_cancelled
    assert deadline.reason is group.reason


def look_until_the_process_ends(watchdog: Watchdog) -> None:
    for _ in range(1 + END_LOOKS):
        watchdog.look()


def test_the_last_resort_says_who_is_waited_for() -> None:
    said: list[str] = []
    group = Group(CancelScope(1e-9))
    watchdog = Watchdog(said.append)
    watchdog.watch(group)
    look_until_the_process_ends(watchdog)
    assert group.interrupted.wait(10.0)
    assert said == group.reported == ["it waits for rank 1"]


def test_a_group_that_nobody_holds_is_forgotten() -> None:
    watchdog = Watchdog(lambda words: None)
    watchdog.watch(Group(CancelScope(1e-9)))
    gc.collect()
    watchdog.look()
    assert watchdog._watched == []


class BrokenGroup(Group):
    """One whose every answer is an error."""

    def reason_to_give_up(self) -> TransportError | None:
        raise OSError("no answer")

    def missing_in_words(self) -> str:
        raise OSError("no answer")


def test_an_error_of_one_group_ends_neither_the_watch_over_it_nor_over_others(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    broken, group = BrokenGroup(CancelScope(1e-9)), Group(CancelScope(1e-9))
    watchdog = Watchdog(said.append)
    watchdog.watch(broken)
    watchdog.watch(group)
    look_until_the_process_ends(watchdog)
    assert broken.interrupted.wait(10.0)
    assert said == ["a collective did not end", "it waits for rank 1"]
    assert [record.message for record in caplog.records] == ["the watchdog goes on after an error"]


def test_the_process_ends_even_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    said: list[str] = []
    group = Group(CancelScope(1e-9))
    watchdog = Watchdog(said.append)
    watchdog.watch(group)
    look_until_the_process_ends(watchdog)
    assert said == ["it waits for rank 1"]
