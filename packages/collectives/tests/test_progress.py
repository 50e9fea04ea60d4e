"""One total order, asserted on recorded logs. See Note [One total order] in `progress`."""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest

from syncline.collectives.host.progress import Progress


class Recorder:
    """Tasks that write their names when they start and end."""

    def __init__(self) -> None:
        self.progress = Progress("test")
        self.log: list[str] = []

    def task(self, name: str, *children, gate: threading.Event | None = None):
        def run() -> None:
            self.log.append(f"<{name}")
            if gate is not None:
                assert gate.wait(10)
            for child in children:
                child()
            self.log.append(f"{name}>")

        return run

    def finish(self) -> list[str]:
        # A machine that is lent to others, too, may stand still for tens of seconds.
        assert self.progress.drain(60), self.where_it_is()
        self.progress.stop()
        return self.log

    def where_it_is(self) -> str:
        thread, frames = self.progress._thread, sys._current_frames()
        frame = frames.get(thread.ident or 0) if thread is not None else None
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "no thread"
        return f"{len(self.progress._queue)} queued, running on {self.progress.running_on}, log ends {self.log[-3:]}:\n{stack}"


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_runs_here_when_nothing_is_in_flight(recorder: Recorder) -> None:
    ran_on: list[int] = []
    assert recorder.progress.run_here(lambda: ran_on.append(threading.get_ident()))
    assert ran_on == [threading.get_ident()]
    assert recorder.progress._thread is None, "no thread before it is needed"


def test_whoever_takes_the_turn_is_alone_until_it_is_given_back(recorder: Recorder) -> None:
    progress = recorder.progress
    assert progress.take_turn()
    assert progress.is_running_here()
    assert not progress.take_turn()  # not twice; `run_here` knows who has it
    assert progress.run_here(recorder.task("A"))
    with ThreadPoolExecutor() as others:
        assert not others.submit(progress.take_turn).result()
        assert not others.submit(progress.run_here, recorder.task("B")).result()
    progress.running_on = None
    progress.turn.release()
    assert not progress.is_running_here()
    assert progress.take_turn()
    assert recorder.log == ["<A", "A>"]


def test_does_not_run_here_past_the_queue(recorder: Recorder) -> None:
    gate = threading.Event()
    recorder.progress.enqueue(recorder.task("A", gate=gate))
    recorder.progress.enqueue(recorder.task("B"))
    assert not recorder.progress.run_here(recorder.task("C"))
    gate.set()
    assert recorder.finish() == ["<A", "A>", "<B", "B>"]


def test_does_not_run_here_in_the_moment_before_the_thread_takes_what_is_queued(recorder: Recorder) -> None:
    recorder.progress._queue.append(recorder.task("A"))
    assert not recorder.progress.run_here(recorder.task("B"))
    recorder.progress.enqueue(recorder.task("B"))
    assert recorder.finish() == ["<A", "A>", "<B", "B>"]


def test_in_order_of_issue(recorder: Recorder) -> None:
    for number in range(200):
        recorder.progress.enqueue(recorder.task(str(number)))
    assert recorder.finish() == [entry for number in range(200) for entry in (f"<{number}", f"{number}>")]


def test_a_task_issued_in_a_task_runs_inside_it_before_the_queue(recorder: Recorder) -> None:
    progress, gate = recorder.progress, threading.Event()

    def issue_children() -> None:
        progress.enqueue(recorder.task("A1", lambda: progress.enqueue(recorder.task("A1a"))))
        assert progress.run_here(recorder.task("A2"))

    progress.enqueue(recorder.task("A", issue_children, gate=gate))
    progress.enqueue(recorder.task("B"))
    gate.set()
    assert recorder.finish() == ["<A", "<A1", "<A1a", "A1a>", "A1>", "<A2", "A2>", "A>", "<B", "B>"]


def test_the_same_when_the_parent_runs_on_the_callers_thread(recorder: Recorder) -> None:
    progress = recorder.progress
    progress.run_here(recorder.task("A", lambda: progress.enqueue(recorder.task("A1"))))
    progress.enqueue(recorder.task("B"))
    assert recorder.finish() == ["<A", "<A1", "A1>", "A>", "<B", "B>"]


def test_run_until_runs_the_queue_up_to_what_is_waited_for(recorder: Recorder) -> None:
    progress, gate = recorder.progress, threading.Event()
    done: list[str] = []
    progress.enqueue(recorder.task("A", lambda: progress.run_until(lambda: "C" in done), gate=gate))
    for name in "BCD":
        progress.enqueue(recorder.task(name, lambda name=name: done.append(name)))
    gate.set()
    assert recorder.finish() == ["<A", "<B", "B>", "<C", "C>", "A>", "<D", "D>"]


def test_run_until_gives_up_when_the_queue_is_empty(recorder: Recorder) -> None:
    progress = recorder.progress
    progress.run_here(lambda: progress.run_until(lambda: False))


def test_is_running_here(recorder: Recorder) -> None:
    progress = recorder.progress
    seen: list[bool] = []
    progress.enqueue(lambda: seen.append(progress.is_running_here()))
    assert progress.drain(5)
    progress.run_here(lambda: seen.append(progress.is_running_here()))
    assert seen == [True, True]
    assert not progress.is_running_here()
    progress.stop()


def test_drain_gives_up(recorder: Recorder) -> None:
    gate = threading.Event()
    recorder.progress.enqueue(recorder.task("A", gate=gate))
    assert not recorder.progress.drain(0.01)
    gate.set()
    assert recorder.finish() == ["<A", "A>"]


def test_stop_ends_the_thread_after_the_queue(recorder: Recorder) -> None:
    gate = threading.Event()
    recorder.progress.enqueue(recorder.task("A", gate=gate))
    recorder.progress.enqueue(recorder.task("B"))
    thread = recorder.progress._thread
    assert thread is not None
    assert thread.daemon
    recorder.progress.stop()
    gate.set()
    thread.join(5)
    assert not thread.is_alive()
    assert recorder.log == ["<A", "A>", "<B", "B>"]


def test_where_no_thread_can_start_nothing_is_left_in_the_queue(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    progress = recorder.progress
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            progress.enqueue(recorder.task("A"))
        assert progress.is_idle()
        assert progress.run_here(recorder.task("B"))
        progress.join(1)
    progress.enqueue(recorder.task("C"))
    assert recorder.finish() == ["<B", "B>", "<C", "C>"]


@pytest.mark.parametrize("seed", range(20))
def test_stress_one_task_at_a_time_and_in_order(seed: int) -> None:
    """Random mixtures of queued tasks, tasks run here, children and pauses: one at a time, children inside parents."""
    recorder, pauses = Recorder(), random.Random(seed)
    progress = recorder.progress
    running = 0

    def task(name: str, depth: int):
        children = [f"{name}.{n}" for n in range(pauses.choice((0, 0, 1, 2)))] if depth < 3 else []
        queued = [pauses.random() < 0.5 for _ in children]
        subtasks = [task(child, depth + 1) for child in children]
        pause_s = pauses.choice((0, 0, 0, 1e-4, 5e-4))

        def run() -> None:
            nonlocal running
            running += depth == 0
            assert running == 1
            recorder.log.append(name)
            time.sleep(pause_s)
            for subtask, is_queued in zip(subtasks, queued, strict=True):
                if is_queued:
                    progress.enqueue(subtask)
                else:
                    assert progress.run_here(subtask)
            running -= depth == 0

        return run

    for number in range(100):
        subject = task(f"{number:03}", 0)
        if pauses.random() < 0.5 or not progress.run_here(subject):
            progress.enqueue(subject)
        if pauses.random() < 0.1:
            time.sleep(5e-4)
    log = recorder.finish()
    assert log == sorted(log), "parents in order of issue, each followed by its children"
    assert sum("." not in name for name in log) == 100


# ---- whoever waits ----


@pytest.fixture
def unattended(recorder: Recorder) -> Recorder:
    """Without a thread that takes what is queued."""
    recorder.progress._thread = threading.current_thread()
    return recorder


def test_a_waiter_runs_what_comes_before_its_task_and_no_more(unattended: Recorder) -> None:
    progress, log = unattended.progress, unattended.log
    for name in "ABC":
        assert progress.enqueue(unattended.task(name))
    progress.help(lambda: "B>" in log)
    assert log == ["<A", "A>", "<B", "B>"]
    assert not progress.is_running_here()
    progress.help(lambda: False)
    assert log[4:] == ["<C", "C>"]
    assert progress.is_idle()


def test_a_waiter_does_not_run_anything_while_another_thread_has_the_turn(unattended: Recorder) -> None:
    progress = unattended.progress
    assert progress.enqueue(unattended.task("A"))
    with progress.turn:
        progress.help(lambda: False)
    assert unattended.log == []


def test_what_a_waiters_task_hands_over_comes_next_and_is_not_run_by_it(unattended: Recorder) -> None:
    progress, log = unattended.progress, unattended.log
    progress.enqueue(unattended.task("A", lambda: log.append(str(progress.hand_over(unattended.task("callbacks of A"))))))
    progress.enqueue(unattended.task("B"))
    progress.help(lambda: "A>" in log)
    assert log == ["<A", "True", "A>"]
    progress.help(lambda: False)
    assert log[3:] == ["<callbacks of A", "callbacks of A>", "<B", "B>"]


def test_nothing_is_handed_over_by_other_tasks_nor_after_the_end(unattended: Recorder) -> None:
    progress, log = unattended.progress, unattended.log
    handing_over = unattended.task("A", lambda: log.append(str(progress.hand_over(unattended.task("never")))))
    assert progress.run_here(handing_over)
    progress.enqueue(handing_over)
    progress.stop()
    progress.help(lambda: False)
    assert log == ["<A", "False", "A>"] * 2
