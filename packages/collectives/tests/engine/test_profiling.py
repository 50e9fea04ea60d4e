"""What torch's profilers show of our groups' collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from syncline.collectives import ProcessGroup, RoundRobinGroup
from syncline.collectives.engine import observers
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.transfer import TransferWork
from syncline.collectives.engine.transport import Request
from syncline.collectives.testing import run_ranks
from syncline.collectives.work import PendingWork

pytestmark = pytest.mark.ranks


def shown(use: Callable[[], object]) -> list[tuple[str, list[list[int]]]]:
    with torch.profiler.profile(record_shapes=True) as profile:
        use()
    return [(event.name, event.input_shapes) for event in profile.events() if event.name.startswith("syncline")]


def test_each_collective_is_shown_with_name_and_shapes() -> None:
    def body(group: ProcessGroup) -> None:
        def use() -> None:
            group.all_reduce(torch.ones(2, 3))
            group.broadcast(torch.ones(4), 0, async_op=True).wait()
            group.barrier()

        name = f"syncline-{group.backend_name}"
        assert shown(use) == [(f"{name}:all_reduce", [[2, 3]]), (f"{name}:broadcast", [[4]]), (f"{name}:barrier", [])]

    run_ranks(1, body)


def test_what_a_collective_is_made_of_is_not_shown_again() -> None:
    def body(group: ProcessGroup) -> None:
        inputs = [torch.ones(rank + 1) for rank in range(group.size)]

        def use() -> None:
            group.reduce_scatter(torch.ones(group.rank + 1), inputs)

        if group.rank == 0:  # one profiler in a process
            assert [name.rpartition(":")[2] for name, _ in shown(use)] == ["reduce_scatter"]
        else:
            use()

    run_ranks(2, body)


def test_the_range_of_an_asynchronous_collective_ends_when_it_has_finished() -> None:
    def body(group: ProcessGroup) -> None:
        peer_may_come = group.all_reduce  # rank 1 comes later than the range begins
        if group.rank == 1:
            group.recv(torch.zeros(1), 0)
            peer_may_come(torch.ones(1))
            return
        with torch.profiler.profile() as profile:
            work = peer_may_come(torch.ones(1), async_op=True)
            with torch.profiler.record_function("meanwhile"):
                pass
            group.send(torch.zeros(1), 1)
            work.wait()
        events = {event.name: event for event in profile.events()}
        (collective,) = (event for name, event in events.items() if name.endswith(":all_reduce"))
        assert collective.time_range.end > events["meanwhile"].time_range.end

    run_ranks(2, body)


def test_without_a_profiler_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "profiled", lambda *_, **__: pytest.fail("recorded"))

    def body(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(1))

    run_ranks(1, body)


def test_of_groups_in_turn_each_shows_its_own_calls() -> None:
    def body(group: ProcessGroup) -> None:
        in_turn = RoundRobinGroup([group, group])

        def use() -> None:
            in_turn.all_reduce(torch.ones(2, 3))
            in_turn.all_gather_into_tensor(torch.ones(3), torch.ones(3))

        assert shown(use) == [
            ("syncline-in_process:all_reduce", [[2, 3]]),
            ("syncline-in_process:_all_gather_base", [[3], [3]]),
        ]

    run_ranks(1, body)


def test_a_work_runs_an_action_before_anybody_knows_that_it_is_over() -> None:
    """Else a program could stop the profiler first, which frees the event that the end of the range writes to."""
    work = PendingWork([], lambda: "a work")
    seen = []

    def action() -> None:
        seen.append((work.is_completed(), work._waiting is not None and work._waiting.is_set()))

    work.before_end(action)
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    assert seen == []
    work.succeed()
    waiter.join(20)
    assert seen == [(False, False)]
    work.fail(RuntimeError("too late"))
    work.before_end(action)
    assert [completed for completed, _ in seen] == [False, True]


def test_an_action_that_fails_runs_once_and_the_work_can_still_end() -> None:
    work = PendingWork([], lambda: "a work")
    ran = []

    def action() -> None:
        ran.append(1)
        raise KeyboardInterrupt

    work.before_end(action)
    with pytest.raises(KeyboardInterrupt):
        work.succeed()
    work.fail(RuntimeError("aborted"))
    assert work.is_completed()
    assert ran == [1]


def test_a_transfer_runs_an_action_before_anybody_knows_that_it_is_over() -> None:
    comes = threading.Event()

    class Late(Request):
        def wait(self, scope: CancelScope) -> None:
            assert comes.wait(60)

        def test(self) -> bool:
            return False

        def source(self) -> int | None:
            return 0

    work = TransferWork(Late(), [torch.ones(1)], lambda: None, lambda: "recv", 60.0)
    seen = []
    ran = threading.Event()

    def action() -> None:
        seen.append(work.is_completed())
        ran.set()

    work.before_end(action)
    assert not ran.is_set()
    comes.set()
    assert ran.wait(20), "nobody waits for the transfer, but its action must run"
    work.wait()
    work.before_end(action)
    assert seen == [False, True]
