"""What a group does about a collective that failed."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from syncline.collectives import CollectiveTimeout, TransportError
from syncline.collectives.engine import host_group
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.health.monitor import END_LOOKS, Escalation, Step
from syncline.collectives.transports.threads import InProcessTransport, SharedState, create_groups
from syncline.collectives.work import AnyFuture, Work, new_future
from test_support.given_up import forget_failure


def fail_once() -> None:
    group = HostGroup(InProcessTransport(SharedState(2), 0), 0, 2, timeout_s=0.001)
    with pytest.raises(CollectiveTimeout):
        group.all_reduce(torch.ones(4))
    group.abort()


def test_only_the_latest_given_up_calls_are_kept() -> None:
    for _ in range(host_group.GIVEN_UP_KEPT + 3):
        fail_once()
    assert len(host_group._given_up) == host_group.GIVEN_UP_KEPT
    first = host_group._given_up[0]
    fail_once()
    assert first is not host_group._given_up[0]


def get_future(work: Work) -> AnyFuture:
    return work.get_future()


def get_following_future(work: Work) -> AnyFuture:
    return work.get_future().then(lambda done: done.wait())


@pytest.mark.parametrize("ask", [get_future, get_following_future])
def test_a_call_that_failed_is_freed_although_the_program_had_its_future(ask: Callable[[Work], AnyFuture]) -> None:
    group = HostGroup(InProcessTransport(SharedState(2), 0), 0, 2, timeout_s=0.001)
    tensor = torch.ones(4)
    gone = weakref.ref(tensor)
    work = group.all_reduce(tensor, async_op=True)
    future = ask(work)
    with pytest.raises(CollectiveTimeout):
        future.wait()
    with pytest.raises(CollectiveTimeout):
        work.wait()
    forget_failure(group)
    del group, tensor, work, future
    gc.collect()
    assert gone() is None


def test_a_call_is_freed_although_its_callback_has_raised() -> None:
    def raises(_: object) -> None:
        raise ValueError("of the callback")

    (group,) = create_groups(1)
    tensor = torch.ones(4)
    gone = weakref.ref(tensor)
    future = group.all_reduce(tensor, async_op=True).get_future().then(raises)
    for look in (future.wait, future.value):
        with pytest.raises(ValueError, match="of the callback"):
            look()
    del tensor, future, look
    gc.collect()
    assert gone() is None
    group.close()


def test_the_first_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="syncline.collectives"):
        fail_once()
    assert "all_reduce on rank 0 of 2 in group 'default' failed" in caplog.text
    assert "runs no other call" in caplog.text


def test_a_rank_that_tells_others_of_its_failure_is_not_taken_for_one_that_hangs() -> None:
    """To write a report or an alarm may take seconds. The library itself has raised the error here, and not the scope."""
    steps: list[Step] = []

    class Failing(HostGroup):
        def _on_failure(self, failure: BaseException) -> None:
            running, escalation = self.running, Escalation()
            assert running is not None
            running.scope.cancel(TransportError("rank 1 is lost"))  # by the monitor, which sees the loss a moment later
            steps.extend(escalation.look(running) for _ in range(1 + END_LOOKS))

    class Broken(InProcessTransport):
        def barrier(self, call: object) -> None:
            raise TransportError("the connection is broken")

    group = Failing(Broken(SharedState(2), 0), 0, 2, timeout_s=60)
    with pytest.raises(TransportError, match="the connection is broken"):
        group.barrier()
    assert set(steps) == {Step.NOTHING}
    group.abort()


def test_the_words_at_the_end_of_a_process_name_the_call() -> None:
    first, second = create_groups(2, timeout_s=30)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(first.all_reduce, torch.ones(3))
        end_s = time.monotonic() + 20
        while first.running is None and time.monotonic() < end_s:
            time.sleep(0.005)
        words = first.missing_in_words()
        second.all_reduce(torch.ones(3))
        running.result()
    assert words.startswith("all_reduce(float32[3], op=SUM), number 0 on rank 0 of 2 in group 'default' did not end: ")
    assert first.missing_in_words().startswith("a collective on rank 0")


class Unspeakable(Exception):
    """An error that is false, and whose text fails."""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("kind", [ValueError, Unspeakable])
def test_a_failed_future_that_only_torch_holds_keeps_the_class_of_its_error(kind: type[Exception]) -> None:
    def fails(_: AnyFuture) -> None:
        raise kind("of the program")

    first = new_future([])
    joined = torch.futures.collect_all([first.then(fails)])
    first.set_result([])
    gc.collect()
    with pytest.raises(kind):
        joined.wait()


def test_the_future_raises_the_error_itself_whatever_the_error_is_like() -> None:
    future, error = new_future([]), Unspeakable()
    future.set_exception(error)
    with pytest.raises(Unspeakable) as found:
        future.wait()
    assert found.value is error


def test_only_an_exception_may_fail_a_future() -> None:
    with pytest.raises(AssertionError, match="not an Exception"):
        new_future([]).set_exception(KeyboardInterrupt())  # type: ignore[arg-type]
