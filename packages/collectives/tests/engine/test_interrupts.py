"""If Ctrl-C ends the thread that runs a call, no wait for this call lasts for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.collectives import ProcessGroup, TransportError, Work
from syncline.collectives.engine.host_group import GroupWork, HostGroup
from syncline.collectives.engine.queue import Queue
from syncline.collectives.testing import run_ranks

pytestmark = pytest.mark.ranks

LIMIT_S = 60.0

on_rank_0: list[threading.Thread] = []  # the thread that is interrupted


def interrupt_first(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
    """Let the first call of a method on rank 0's own thread raise KeyboardInterrupt."""
    method: Callable[..., Any] = getattr(kind, name)
    left = [None]

    def interrupted(self: Any, *arguments: Any) -> Any:
        if left and threading.current_thread() in on_rank_0:
            left.clear()
            raise KeyboardInterrupt
        return method(self, *arguments)

    on_rank_0.clear()
    monkeypatch.setattr(kind, name, interrupted)


def wait_interrupted(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor) -> Work:
    """Issue a call. On rank 0, wait for the call until the interrupt comes; no other thread runs the call meanwhile."""
    if group.rank != 0:
        return group.all_reduce(tensor, async_op=True)
    assert isinstance(group, HostGroup)
    has_loop = threading.Event()
    loop = group._queue._loop

    def late() -> None:
        assert has_loop.wait(LIMIT_S)
        loop()

    monkeypatch.setattr(group._queue, "_loop", late)
    work = group.all_reduce(tensor, async_op=True)
    work.get_future()
    on_rank_0.append(threading.current_thread())
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    on_rank_0.clear()
    has_loop.set()
    return work


@pytest.mark.parametrize(("kind", "name"), [(HostGroup, "_run_into"), (GroupWork, "_complete"), (Queue, "hand_over")])
def test_a_wait_after_ctrl_c_ends(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_first(monkeypatch, kind, name)

    def body(group: ProcessGroup) -> None:
        tensor = torch.full((3,), group.rank + 1.0)
        work = wait_interrupted(group, monkeypatch, tensor)
        future = work.get_future()
        assert work.wait(LIMIT_S)
        over = threading.Event()
        future.add_done_callback(lambda _: over.set())
        assert over.wait(LIMIT_S)
        assert tensor.tolist() == [3.0] * 3
        group.all_reduce(tensor)
        assert tensor.tolist() == [6.0] * 3

    run_ranks(2, body)


def test_a_call_whose_work_ctrl_c_keeps_from_its_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_first(monkeypatch, GroupWork, "succeed")

    def body(group: ProcessGroup) -> None:
        work = wait_interrupted(group, monkeypatch, torch.ones(1))
        if group.rank == 0:
            group.abort()
            with pytest.raises(KeyboardInterrupt):
                work.wait(LIMIT_S)

    run_ranks(2, body)


@pytest.mark.parametrize(
    "wait", [lambda group, later: later.wait(), lambda group, later: group.barrier()], ids=["wait", "barrier"]
)
def test_ctrl_c_reaches_the_program_that_waits_for_a_later_call(wait, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting thread runs the earlier call, whose work nobody waits for."""
    interrupt_first(monkeypatch, HostGroup, "_move")

    def body(group: ProcessGroup) -> None:
        if group.rank == 1:
            return
        assert isinstance(group, HostGroup)
        is_over = threading.Event()
        monkeypatch.setattr(group._queue, "_loop", lambda loop=group._queue._loop: (is_over.wait(LIMIT_S), loop()))
        earlier = group.all_reduce(torch.ones(1), async_op=True)
        later = group.all_reduce(torch.ones(1), async_op=True)
        on_rank_0.append(threading.current_thread())
        with pytest.raises(KeyboardInterrupt):
            wait(group, later)
        on_rank_0.clear()
        is_over.set()
        with pytest.raises(KeyboardInterrupt):
            earlier.wait(LIMIT_S)
        with pytest.raises(TransportError, match="was not started because the group had failed before:\n  KeyboardInterrupt"):
            later.wait(LIMIT_S)

    run_ranks(2, body)


def test_an_error_that_is_no_exception_does_not_end_the_queues_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cancelled(BaseException):
        """Raised by a transport, for example."""

    def body(group: ProcessGroup) -> None:
        assert isinstance(group, HostGroup)

        def cancelled(_: object) -> None:
            raise Cancelled

        monkeypatch.setattr(group, "_move", cancelled)
        first, second = (group.all_reduce(torch.ones(1), async_op=True) for _ in range(2))
        with pytest.raises(TransportError, match="Cancelled"):
            second.wait(LIMIT_S)  # with a time limit, only the queue's thread runs the calls
        with pytest.raises(Cancelled):
            first.wait(LIMIT_S)

    run_ranks(2, body)
