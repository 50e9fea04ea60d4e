"""One total order, asserted on recorded logs. See Note [One total order] in `engine.queue`."""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest

from syncline.collectives.engine.queue import Queue


class Recorder:
    """Tasks that write their names when they start and end."""

    def __init__(self) -> None:
        self.queue = Queue("test")
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
        assert self.queue.drain(60), self.where_it_is()
        self.queue.stop()
        return self.log

    def where_it_is(self) -> str:
        thread, frames = self.queue._thread, sys._current_frames()
        frame = frames.get(thread.ident or 0) if thread is not None else None
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "no thread"
        return f"{len(self.queue._tasks)} queued, running on {self.queue._running_on}, log ends {self.log[-3:]}:\n{stack}"


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_runs_here_when_nothing_is_in_flight(recorder: Recorder) -> None:
    ran_on: list[int] = []
    assert recorder.queue.run_here(lambda: ran_on.append(threading.get_ident()))
    assert ran_on == [threading.get_ident()]
    assert recorder.queue._thread is None, "no thread before it is needed"


def test_while_a_task_runs_no_other_thread_runs_one(recorder: Recorder) -> None:
    queue = recorder.queue
    with ThreadPoolExecutor() as others:
        answers: list[bool] = []

        def ask_another_thread() -> None:
            answers.append(others.submit(queue.run_here, recorder.task("B")).result(60))
            answers.append(others.submit(queue.is_running_here).result(60))

        assert queue.run_here(recorder.task("A", ask_another_thread))
        assert answers == [False, False]
        assert others.submit(queue.run_here, recorder.task("C")).result(60)
    assert recorder.log == ["<A", "A>", "<C", "C>"]


def test_what_interrupts_a_task_gives_the_turn_back(recorder: Recorder) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorder.queue.run_here(interrupted)
    assert not recorder.queue.is_running_here()
    assert recorder.queue.run_here(recorder.task("A"))
    recorder.queue.enqueue(recorder.task("B"))
    assert recorder.finish() == ["<A", "A>", "<B", "B>"]


def test_does_not_run_here_past_the_queue(recorder: Recorder) -> None:
    gate = threading.Event()
    recorder.queue.enqueue(recorder.task("A", gate=gate))
    recorder.queue.enqueue(recorder.task("B"))
    assert not recorder.queue.run_here(recorder.task("C"))
    gate.set()
    assert recorder.finish() == ["<A", "A>", "<B", "B>"]


def test_does_not_run_here_in_the_moment_before_the_thread_takes_what_is_queued(recorder: Recorder) -> None:
    recorder.queue._tasks.append(recorder.task("A"))
    assert not recorder.queue.run_here(recorder.task("B"))
    recorder.queue.enqueue(recorder.task("B"))
    assert recorder.finish() == ["<A", "A>", "<B", "B>"]


def test_in_order_of_issue(recorder: Recorder) -> None:
    for number in range(200):
        recorder.queue.enqueue(recorder.task(str(number)))
    assert recorder.finish() == [entry for number in range(200) for entry in (f"<{number}", f"{number}>")]


def test_a_task_issued_in_a_task_runs_inside_it_before_the_queue(recorder: Recorder) -> None:
    queue, gate = recorder.queue, threading.Event()

    def issue_children() -> None:
        queue.enqueue(recorder.task("A1", lambda: queue.enqueue(recorder.task("A1a"))))
        assert queue.run_here(recorder.task("A2"))

    queue.enqueue(recorder.task("A", issue_children, gate=gate))
    queue.enqueue(recorder.task("B"))
    gate.set()
    assert recorder.finish() == ["<A", "<A1", "<A1a", "A1a>", "A1>", "<A2", "A2>", "A>", "<B", "B>"]


def test_the_same_when_the_parent_runs_on_the_callers_thread(recorder: Recorder) -> None:
    queue = recorder.queue
    queue.run_here(recorder.task("A", lambda: queue.enqueue(recorder.task("A1"))))
    queue.enqueue(recorder.task("B"))
    assert recorder.finish() == ["<A", "<A1", "A1>", "A>", "<B", "B>"]


def test_run_until_runs_the_queue_up_to_what_is_waited_for(recorder: Recorder) -> None:
    queue, gate = recorder.queue, threading.Event()
    done: list[str] = []
    queue.enqueue(recorder.task("A", lambda: queue.run_until(lambda: "C" in done), gate=gate))
    for name in "BCD":
        queue.enqueue(recorder.task(name, lambda name=name: done.append(name)))
    gate.set()
    assert recorder.finish() == ["<A", "<B", "B>", "<C", "C>", "A>", "<D", "D>"]


def test_run_until_gives_up_when_the_queue_is_empty(recorder: Recorder) -> None:
    queue = recorder.queue
    queue.run_here(lambda: queue.run_until(lambda: False))


def test_is_running_here(recorder: Recorder) -> None:
    queue = recorder.queue
    seen: list[bool] = []
    queue.enqueue(lambda: seen.append(queue.is_running_here()))
    assert queue.drain(5)
    queue.run_here(lambda: seen.append(queue.is_running_here()))
    assert seen == [True, True]
    assert not queue.is_running_here()
    queue.stop()


def test_drain_gives_up(recorder: Recorder) -> None:
    gate = threading.Event()
    recorder.queue.enqueue(recorder.task("A", gate=gate))
    assert not recorder.queue.drain(0.01)
    gate.set()
    assert recorder.finish() == ["<A", "A>"]


def test_stop_ends_the_thread_after_the_queue(recorder: Recorder) -> None:
    gate = threading.Event()
    recorder.queue.enqueue(recorder.task("A", gate=gate))
    recorder.queue.enqueue(recorder.task("B"))
    thread = recorder.queue._thread
    assert thread is not None
    assert thread.daemon
    recorder.queue.stop()
    gate.set()
    thread.join(5)
    assert not thread.is_alive()
    assert recorder.log == ["<A", "A>", "<B", "B>"]


def test_where_no_thread_can_start_nothing_is_left_in_the_queue(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    queue = recorder.queue
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            queue.enqueue(recorder.task("A"))
        assert queue.is_idle()
        assert queue.run_here(recorder.task("B"))
        queue.join(1)
    queue.enqueue(recorder.task("C"))
    assert recorder.finish() == ["<B", "B>", "<C", "C>"]


@pytest.mark.parametrize("seed", range(20))
def test_stress_one_task_at_a_time_and_in_order(seed: int) -> None:
    """Random mixtures of queued tasks, tasks run here, children and pauses: one at a time, children inside parents."""
    recorder, pauses = Recorder(), random.Random(seed)
    queue = recorder.queue
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
                    queue.enqueue(subtask)
                else:
                    assert queue.run_here(subtask)
            running -= depth == 0

        return run

    for number in range(100):
        subject = task(f"{number:03}", 0)
        if pauses.random() < 0.5 or not queue.run_here(subject):
            queue.enqueue(subject)
        if pauses.random() < 0.1:
            time.sleep(5e-4)
    log = recorder.finish()
    assert log == sorted(log), "parents in order of issue, each followed by its children"
    assert sum("." not in name for name in log) == 100


# ---- whoever waits ----


@pytest.fixture
def unattended(recorder: Recorder) -> Recorder:
    """Without a thread that takes what is queued."""
    recorder.queue._thread = threading.Thread()
    return recorder


def test_a_waiter_runs_what_comes_before_its_task_and_no_more(unattended: Recorder) -> None:
    queue, log = unattended.queue, unattended.log
    for name in "ABC":
        assert queue.enqueue(unattended.task(name))
    queue.help(lambda: "B>" in log)
    assert log == ["<A", "A>", "<B", "B>"]
    assert not queue.is_running_here()
    queue.help(lambda: False)
    assert log[4:] == ["<C", "C>"]
    assert queue.is_idle()


def test_a_waiter_does_not_run_anything_while_another_thread_has_the_turn(unattended: Recorder) -> None:
    queue = unattended.queue
    assert queue.enqueue(unattended.task("A"))
    has_turn, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with queue._turn:
            has_turn.set()
            may_end.wait(10)

    other = threading.Thread(target=hold)
    other.start()
    assert has_turn.wait(10)
    queue.help(lambda: False)
    assert unattended.log == []
    may_end.set()
    other.join()


def test_what_a_waiters_task_hands_over_comes_next_and_is_not_run_by_any_waiter(unattended: Recorder) -> None:
    queue, log = unattended.queue, unattended.log
    queue.enqueue(unattended.task("A", lambda: log.append(str(queue.hand_over(unattended.task("callbacks of A"))))))
    queue.enqueue(unattended.task("B"))
    queue.help(lambda: False)
    assert log == ["<A", "True", "A>"]
    queue.help(lambda: False)
    assert not queue.run_here(unattended.task("a call that comes later"))
    assert log[3:] == []
    assert not queue.is_idle()
    assert not queue.drain(0.01)
    threading.Thread(target=queue._loop, daemon=True).start()
    assert queue.drain(10)
    assert log[3:] == ["<callbacks of A", "callbacks of A>", "<B", "B>"]


def test_a_call_does_not_overtake_callbacks_that_a_waiter_hands_over_meanwhile(unattended: Recorder) -> None:
    """The waiter hands over its callbacks and gives the turn back just before the call takes the turn."""
    queue, runs, may_end = unattended.queue, threading.Event(), threading.Event()

    def task() -> None:
        runs.set()
        assert may_end.wait(10)
        assert queue.hand_over(unattended.task("callbacks of A"))

    queue.enqueue(task)
    waiter = threading.Thread(target=queue.help, args=(lambda: False,))
    waiter.start()
    assert runs.wait(10)

    class Turn:
        """The turn of the queue, which the waiter gives back while `acquire` begins."""

        def __init__(self, turn) -> None:
            self._turn, self.release = turn, turn.release

        def acquire(self, blocking: bool) -> bool:
            may_end.set()
            waiter.join(10)
            return self._turn.acquire(blocking)

    queue._turn = Turn(queue._turn)
    assert not queue.run_here(unattended.task("a call that comes later"))
    may_end.set()
    waiter.join(10)
    assert unattended.log == []
    assert not queue.is_running_here()


class InterruptedLock:
    """A lock whose `acquire` takes the lock and is then interrupted, as by Ctrl-C at the worst moment."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.release = self._lock.release

    def acquire(self, *arguments: object, **options: object) -> bool:
        assert self._lock.acquire(False)
        raise KeyboardInterrupt

    def is_free(self) -> bool:
        """Whether another thread can take the lock."""
        found: list[bool] = []
        other = threading.Thread(target=lambda: found.append(self._lock.acquire(False)))
        other.start()
        other.join()
        return found[0]


@pytest.mark.parametrize(
    ("take", "tasks"),
    [
        (lambda queue: queue.run_here(lambda: None), []),
        (lambda queue: queue.help(lambda: False), [lambda: None]),
        (lambda queue: queue.drain(10), []),
    ],
    ids=["run_here", "help", "drain"],
)
def test_ctrl_c_that_comes_while_the_turn_is_taken_leaves_the_turn_free(take, tasks: list) -> None:
    queue = Queue("interrupted")
    turn = queue._turn = InterruptedLock()
    queue._tasks.extend(tasks)
    with pytest.raises(KeyboardInterrupt):
        take(queue)
    assert turn.is_free()


class InterruptedOnce:
    """Raises KeyboardInterrupt at the first call, as Ctrl-C at the beginning of a function. Later calls go on to `function`."""

    def __init__(self, function) -> None:
        self._function = function
        self._came = False

    def __call__(self, *arguments):
        if not self._came:
            self._came = True
            raise KeyboardInterrupt
        return self._function(*arguments)


@pytest.mark.parametrize("run", ["help", "run_until"])
def test_a_task_that_ctrl_c_ends_is_run_again_before_later_tasks(unattended: Recorder, run: str) -> None:
    queue, log = unattended.queue, unattended.log
    queue.enqueue(InterruptedOnce(unattended.task("A")))
    queue.enqueue(unattended.task("B"))
    with pytest.raises(KeyboardInterrupt):
        getattr(queue, run)(lambda: False)
    assert not queue.is_running_here()
    assert log == []
    threading.Thread(target=queue._loop, daemon=True).start()
    assert unattended.finish() == ["<A", "A>", "<B", "B>"]


def test_nothing_is_handed_over_by_other_tasks_nor_after_the_end(unattended: Recorder) -> None:
    queue, log = unattended.queue, unattended.log
    handing_over = unattended.task("A", lambda: log.append(str(queue.hand_over(unattended.task("never")))))
    assert queue.run_here(handing_over)
    queue.enqueue(handing_over)
    queue.stop()
    queue.help(lambda: False)
    assert log == ["<A", "False", "A>"] * 2
