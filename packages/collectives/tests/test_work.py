from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import CodeType, FrameType

import pytest
import torch

from syncline.collectives import CollectiveTimeout, InvalidArgumentError, RankLostError, TransportError, Work
from syncline.collectives.work import FinishedWork, FutureWork, GroupFuture, PendingWork, future_for_torch, join_futures
from test_support.waiting import wait_until


def pending(*tensors: torch.Tensor) -> PendingWork:
    return PendingWork(list(tensors), lambda: "all_reduce(float32[3])")


@pytest.mark.parametrize("work", [FinishedWork([]), pending()], ids=["finished", "pending"])
def test_no_truth_value(work: Work) -> None:
    with pytest.raises(TypeError, match=r"no truth value.*wait\(\).*is_completed\(\)"):
        bool(work)


def test_finished() -> None:
    tensor = torch.ones(2)
    work = FinishedWork([tensor])
    assert work.wait(1) is True
    assert work.is_completed()
    assert work.exception() is None
    assert work.result()[0] is tensor
    assert work.get_future().wait()[0] is tensor


def test_pending_then_well() -> None:
    tensor = torch.ones(2)
    work = pending(tensor)
    assert not work.is_completed()
    assert not work.get_future().done()
    work.succeed()
    assert work.is_completed()
    assert work.wait() is True
    assert work.wait(timedelta(seconds=1)) is True
    assert work.get_future().value()[0] is tensor
    assert work.result()[0] is tensor


def test_the_first_end_counts() -> None:
    """An abort may be faster than the thread that it gives up on, and the other way round."""
    aborted, done = pending(), pending(torch.ones(2))
    futures = aborted.get_future(), done.get_future()
    aborted.fail(TransportError("aborted"))
    aborted.succeed()
    done.succeed()
    done.fail(TransportError("too late"))
    with pytest.raises(TransportError, match="aborted"):
        aborted.wait()
    with pytest.raises(Exception, match="aborted"):
        futures[0].value()
    assert done.wait()
    assert done.exception() is None
    assert futures[1].value()[0].tolist() == [1.0, 1.0]


def test_pending_then_badly() -> None:
    work = pending()
    future = work.get_future()
    work.fail(TransportError("the cable is cut"))
    assert work.is_completed()
    assert isinstance(work.exception(), TransportError)
    for _ in range(2):
        with pytest.raises(TransportError, match="the cable is cut"):
            work.wait()
    with pytest.raises(Exception, match="the cable is cut"):
        future.wait()
    with pytest.raises(Exception, match="the cable is cut"):
        work.get_future().value()


def test_wait_with_a_time_limit() -> None:
    work = pending()
    for timeout in (0.01, timedelta(milliseconds=10)):
        with pytest.raises(CollectiveTimeout, match=r"all_reduce\(float32\[3\]\) did not finish within the 0.01 s"):
            work.wait(timeout)
    assert not work.is_completed()
    work.succeed()
    assert work.wait(0.01)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_wait_refuses_nonsense(timeout: float) -> None:
    with pytest.raises(InvalidArgumentError):
        pending().wait(timeout)


def test_wakes_all_waiters() -> None:
    work = pending()
    threads = [threading.Thread(target=work.wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    work.succeed()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_the_future_is_one_object() -> None:
    work = pending()
    assert work.get_future() is work.get_future()
    work.succeed()
    assert work.get_future() is work.get_future()


def test_callbacks_run_on_the_finishing_thread_or_late_on_the_callers() -> None:
    work = pending(torch.ones(1))
    ran_on: dict[str, int] = {}
    work.get_future().then(lambda _: ran_on.setdefault("early", threading.get_ident()))
    finisher = threading.Thread(target=work.succeed)
    finisher.start()
    finisher.join()
    work.get_future().then(lambda _: ran_on.setdefault("late", threading.get_ident()))
    assert ran_on == {"early": finisher.ident, "late": threading.get_ident()}


def test_waiters_wake_before_callbacks_end() -> None:
    """A callback may take its time, or wait for the main thread, without holding up those who wait for the collective."""
    work = pending()
    go_on = threading.Event()
    work.get_future().then(lambda _: go_on.wait(10))
    finisher = threading.Thread(target=work.succeed)
    finisher.start()
    work.wait(5)
    go_on.set()
    finisher.join(5)
    assert not finisher.is_alive()


@pytest.mark.parametrize("error", [None, TransportError("the cable is cut")])
def test_a_wait_returns_when_the_future_is_done_too(error: Exception | None) -> None:
    returned = threading.Event()

    class Late(PendingWork):
        """Completes its future only when a wait has had time to return without it."""

        def _complete(self, future: GroupFuture) -> None:
            returned.wait(0.3)
            super()._complete(future)

    work = Late([], lambda: "a barrier")
    future = work.get_future()
    finisher = threading.Thread(target=work.succeed if error is None else lambda: work.fail(error))
    finisher.start()
    with nullcontext() if error is None else pytest.raises(TransportError, match="the cable is cut"):
        work.wait(60)
    is_done = future.done()
    returned.set()
    finisher.join(60)
    assert is_done


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_wait_for_a_future_ends_before_callbacks_end(timeout: float | None) -> None:
    future, go_on = GroupFuture(None), threading.Event()
    work = FutureWork(future, [], lambda: "a barrier")
    future.add_done_callback(lambda _: go_on.wait(10))
    finisher = threading.Thread(target=future.set_result, args=([],))
    finisher.start()
    work.wait(timeout)
    assert not go_on.is_set()
    assert finisher.is_alive(), "its callback still waits"
    go_on.set()
    finisher.join(60)


@pytest.mark.parametrize("timeout", [None, 60])
def test_ctrl_c_ends_a_wait_for_a_future(timeout: float | None) -> None:
    future = GroupFuture(None)
    work = FutureWork(future, [], lambda: "a barrier")
    main_thread, is_interrupted = threading.main_thread().ident, threading.Event()
    assert main_thread is not None

    def interrupt() -> None:
        try:
            wait_until(lambda: FutureWork.wait.__code__ in codes_of(sys._current_frames()[main_thread]))
            os.kill(os.getpid(), signal.SIGINT)
            is_interrupted.wait(30)
        finally:
            if not is_interrupted.is_set():
                future.set_result([])

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        work.wait(timeout)
    assert not future.done()
    is_interrupted.set()
    thread.join()


def codes_of(frame: FrameType | None) -> Iterator[CodeType]:
    """The code of a frame, and of the frames that called it."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def test_errors_of_callbacks_keep_their_type() -> None:
    """torch's futures make a RuntimeError of their text."""
    work = pending()
    last = work.get_future().then(lambda done: done.value()).then(lambda done: done.value()[0] + 1)
    error = RankLostError("rank 1 is gone", [1])
    work.fail(error)
    with pytest.raises(RankLostError) as caught:
        last.wait()
    assert caught.value is error

    def callback(done: object) -> None:
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        FinishedWork([]).get_future().then(callback).then(lambda done: done.value()).wait()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_a_callback_that_an_interrupt_ends_completes_its_future(error: BaseException) -> None:
    def callback(done: object) -> None:
        raise error

    last = FinishedWork([]).get_future().then(callback)
    assert last.done()
    with pytest.raises(TransportError, match=r"^(KeyboardInterrupt|SystemExit: 3)$") as caught:
        last.wait()
    assert caught.value.__cause__ is error


def test_what_a_callback_returns_reaches_the_next() -> None:
    work = pending(torch.ones(1))
    last = work.get_future().then(lambda done: done.value()[0] + 1).then(lambda done: done.value() * 2)
    work.succeed()
    assert last.wait().item() == 2 * (work.result()[0].item() + 1)


def test_joined_futures_wait_for_all_and_keep_the_first_error_as_it_is() -> None:
    works = [pending() for _ in range(3)]
    tensors = [torch.ones(2)]
    joined = join_futures([work.get_future() for work in works], tensors)
    works[2].fail(TransportError("the cable is cut"))
    works[0].succeed()
    assert not joined.done()
    works[1].fail(RankLostError("rank 1 is lost", [1]))
    assert joined.done()
    with pytest.raises(RankLostError, match="rank 1 is lost"):
        joined.wait()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_joined_futures_hold_the_tensors(count: int) -> None:
    tensors = [torch.ones(2)]
    joined = join_futures([FinishedWork([]).get_future() for _ in range(count)], tensors)
    assert joined.done()
    assert joined.wait() is tensors


# ---- what C++ is given ----


def as_seen_by_cpp(future: torch.futures.Future[list[torch.Tensor]]) -> torch.futures.Future[list[torch.Tensor]]:
    """Without what the Python object knows beside: torch wraps the part in C++ anew."""
    return torch._C._distributed_c10d._create_work_from_future(future).get_future()  # type: ignore[attr-defined]


def test_c_plus_plus_sees_the_error_of_a_future_and_its_text() -> None:
    """See Note [Futures that fail]."""
    work = pending(torch.ones(2))
    early = future_for_torch(work.get_future(), work.result())
    assert not early.done()
    work.fail(RankLostError("all_reduce(float32[2]) on rank 1 of 2 in group 'default': rank 0 is lost", ranks=[0]))
    for future in (early, future_for_torch(work.get_future(), work.result())):
        with pytest.raises(RuntimeError, match=r"RankLostError: all_reduce\(float32\[2\]\) on rank 1 of 2 in group 'default'"):
            as_seen_by_cpp(future).value()
        with pytest.raises(RuntimeError, match="rank 0 is lost"):
            future.then(lambda done: done.value()[0]).wait()


def test_c_plus_plus_gets_the_tensors() -> None:
    tensor = torch.arange(3.0)
    for work in (pending(tensor), FinishedWork([tensor])):
        future = future_for_torch(work.get_future(), work.result())
        if isinstance(work, PendingWork):
            work.succeed()
        assert as_seen_by_cpp(future).value()[0] is tensor


def test_many_threads_wait_for_one_work() -> None:
    """Each makes the event for which it blocks, or finds another's, or finds the work done."""
    for _ in range(200):
        work, ready = pending(torch.ones(1)), threading.Barrier(4)

        def wait(work: PendingWork = work, ready: threading.Barrier = ready) -> bool:
            ready.wait()
            return work.wait(60)

        with ThreadPoolExecutor() as others:
            waiting = [others.submit(wait) for _ in range(3)]
            ready.wait()
            work.succeed()
            assert [other.result() for other in waiting] == [True] * 3
