"""What the monitor does about calls that do not end, and whom it calls now and then."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest

from syncline.collectives import RankLostError, TransportError
from syncline.collectives.engine.call import Call, Signature
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.health.monitor import END_LOOKS, INTERRUPT_LOOKS, NOTICED_LOOKS, Escalation, Monitor, Step


def call_of(timeout_s: float) -> Call:
    return Call(Signature("barrier"), 0, scope=CancelScope(timeout_s))


def noticed() -> Call:
    """A call whose thread has seen that its time is over."""
    call = call_of(1e-9)
    with pytest.raises(TimeoutError):
        call.scope.check()
    return call


class Group:
    """A group whose call sits in a library."""

    def __init__(self, running: Call, reason: TransportError | None = None) -> None:
        self.running: Call | None = running
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


def steps(escalation: Escalation, next_call: Callable[[], Call | None], looks: int) -> list[Step]:
    return [escalation.look(next_call()) for _ in range(looks)]


def test_a_call_that_has_time_is_left_alone() -> None:
    call = call_of(100.0)
    assert set(steps(Escalation(), lambda: call, 50)) == {Step.NOTHING}


def test_short_calls_are_left_alone() -> None:
    calls = [call_of(1e-9) for _ in range(50)]
    assert set(steps(Escalation(), calls.pop, 50)) == {Step.NOTHING}
    assert set(steps(Escalation(), lambda: None, 50)) == {Step.NOTHING}


def test_a_call_that_nobody_ends_is_interrupted_and_then_the_process_ends() -> None:
    call = call_of(1e-9)
    found = steps(Escalation(), lambda: call, 1 + END_LOOKS)
    assert found.index(Step.INTERRUPT) == INTERRUPT_LOOKS
    assert found.index(Step.END) == END_LOOKS
    assert found.count(Step.NOTHING) == len(found) - 2


def test_a_cancelled_call_that_nobody_ends_is_one_whose_time_is_over() -> None:
    call = call_of(100.0)
    escalation = Escalation()
    assert set(steps(escalation, lambda: call, 5)) == {Step.NOTHING}
    call.scope.cancel(TransportError("rank 1 ended"))
    found = steps(escalation, lambda: call, END_LOOKS)
    assert found.index(Step.INTERRUPT) == INTERRUPT_LOOKS - 1
    assert found.index(Step.END) == END_LOOKS - 1


def test_a_thread_that_has_noticed_ends_its_call_itself() -> None:
    call = noticed()
    assert set(steps(Escalation(), lambda: call, 50)) == {Step.NOTHING}


def test_a_thread_that_has_noticed_and_does_not_come_back_ends_with_the_process() -> None:
    call = noticed()
    found = steps(Escalation(), lambda: call, 2 * NOTICED_LOOKS)
    assert found.index(Step.INTERRUPT) == NOTICED_LOOKS // 2
    assert found.index(Step.END) == NOTICED_LOOKS
    assert found.count(Step.NOTHING) == len(found) - 2


def test_a_lost_rank_cancels_the_call_that_runs() -> None:
    call = call_of(100.0)
    group = Group(call, RankLostError("rank 1 ended", [1]))
    monitor = Monitor(lambda words: None)
    monitor.watch(group)
    monitor.look()
    assert not call.scope.is_over()  # it has just begun
    monitor.look()
    assert call.scope.is_over()
    assert call.scope.reason is group.reason


def look_until_the_process_ends(monitor: Monitor) -> None:
    for _ in range(1 + END_LOOKS):
        monitor.look()


def test_the_last_resort_says_who_is_waited_for() -> None:
    said: list[str] = []
    group = Group(call_of(1e-9))
    monitor = Monitor(said.append)
    monitor.watch(group)
    look_until_the_process_ends(monitor)
    assert group.interrupted.wait(10.0)
    assert said == group.reported == ["it waits for rank 1"]


def test_a_group_that_nobody_holds_is_forgotten() -> None:
    monitor = Monitor(lambda words: None)
    monitor.watch(Group(call_of(1e-9)))
    gc.collect()
    monitor.look()
    assert monitor._groups == []


class BrokenGroup(Group):
    """One whose every answer is an error."""

    def reason_to_give_up(self) -> TransportError | None:
        raise OSError("no answer")

    def missing_in_words(self) -> str:
        raise OSError("no answer")


def test_an_error_of_one_group_ends_neither_the_watch_over_it_nor_over_others(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    broken, group = BrokenGroup(call_of(1e-9)), Group(call_of(1e-9))
    monitor = Monitor(said.append)
    monitor.watch(broken)
    monitor.watch(group)
    look_until_the_process_ends(monitor)
    assert broken.interrupted.wait(10.0)
    assert said == ["a collective did not end", "it waits for rank 1"]
    assert [record.message for record in caplog.records] == ["the monitor goes on after an error"]


def test_the_process_ends_even_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    said: list[str] = []
    group = Group(call_of(1e-9))
    monitor = Monitor(said.append)
    monitor.watch(group)
    look_until_the_process_ends(monitor)
    assert said == ["it waits for rank 1"]


# ---- whoever wants to be called now and then ----


class Looking:
    """Notes when it is called, and on which thread."""

    def __init__(self, period_s: float, *, may_block: bool = False) -> None:
        self.period_s = period_s
        self.is_idle = False
        self.may_block = may_block
        self.looks: list[float] = []
        self.threads: list[threading.Thread] = []
        self.gate = threading.Event()
        self.gate.set()
        self.came = threading.Semaphore(0)

    def look(self, now_s: float) -> None:
        self.looks.append(now_s)
        self.threads.append(threading.current_thread())
        self.came.release()
        assert self.gate.wait(60)


def test_each_is_called_once_in_its_period() -> None:
    monitor = Monitor(lambda words: None)
    often, seldom = Looking(1.0), Looking(3.0)
    for looking in (often, seldom):
        monitor.call_now_and_then(looking)
    for now_s in (10.0, 10.5, 11.0, 12.0, 12.9, 13.0):
        monitor.look(now_s)
    assert often.looks == [10.0, 11.0, 12.0, 13.0]
    assert seldom.looks == [10.0, 13.0]


def test_a_look_that_blocks_holds_up_nobody_and_is_not_begun_again() -> None:
    monitor = Monitor(lambda words: None)
    blocks, other = Looking(1.0, may_block=True), Looking(1.0)
    blocks.gate.clear()
    for looking in (blocks, other):
        monitor.call_now_and_then(looking)
    for now_s in (10.0, 11.0, 12.0):
        monitor.look(now_s)
    assert blocks.came.acquire(timeout=60)
    assert other.looks == [10.0, 11.0, 12.0]
    assert blocks.looks == [10.0]
    assert blocks.threads != [threading.current_thread()]
    blocks.gate.set()
    blocks.threads[0].join(60)
    monitor.look(13.0)
    assert blocks.came.acquire(timeout=60)
    assert blocks.looks == [10.0, 13.0]


@pytest.mark.parametrize("may_block", [False, True])
def test_who_fails_is_called_no_more(may_block: bool) -> None:
    class Failing(Looking):
        def look(self, now_s: float) -> None:
            super().look(now_s)
            raise OSError("no answer")

    monitor = Monitor(lambda words: None)
    failing, other = Failing(1.0, may_block=may_block), Looking(1.0)
    for looking in (failing, other):
        monitor.call_now_and_then(looking)
    monitor.look(10.0)
    assert failing.came.acquire(timeout=60)
    if may_block:
        failing.threads[0].join(60)
    for now_s in (11.0, 12.0):
        monitor.look(now_s)
    assert failing.looks == [10.0]
    assert other.looks == [10.0, 11.0, 12.0]


def test_whom_nobody_holds_is_called_no_more() -> None:
    monitor = Monitor(lambda words: None)
    dropped = Looking(1.0)
    looks = dropped.looks
    monitor.call_now_and_then(dropped)
    monitor.look(10.0)
    del dropped
    gc.collect()
    monitor.look(11.0)
    assert looks == [10.0]


def test_who_has_nothing_to_look_at_is_left_out() -> None:
    monitor = Monitor(lambda words: None)
    looking = Looking(1.0)
    looking.is_idle = True
    monitor.call_now_and_then(looking)
    monitor.look(10.0)
    assert looking.looks == []
    looking.is_idle = False
    monitor.look(10.1)
    assert looking.looks == [10.1]


def test_a_look_for_which_no_thread_can_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monitor = Monitor(lambda words: None)
    blocks, other = Looking(1.0, may_block=True), Looking(1.0)
    for looking in (blocks, other):
        monitor.call_now_and_then(looking)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        monitor.look(10.0)
    assert other.looks == [10.0]
    monitor.look(11.0)
    assert blocks.came.acquire(timeout=60)
    assert blocks.looks == [11.0]
