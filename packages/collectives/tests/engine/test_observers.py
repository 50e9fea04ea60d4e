"""Who is told of a group's calls, and of which."""

from __future__ import annotations

import time

import pytest
import torch

from syncline.collectives import ProcessGroup
from syncline.collectives.engine.observers import ObservedCall, observe_calls
from syncline.collectives.testing import run_ranks

pytestmark = pytest.mark.ranks


def test_calls_are_told_until_it_is_stopped() -> None:
    def body(group: ProcessGroup) -> list[str]:
        tensor = torch.ones(3)
        group.all_reduce(tensor)
        seen: list[tuple[ObservedCall, torch.Tensor | None]] = []
        stops = [observe_calls(lambda *told: seen.append(told) if told[0].group is group else None) for _ in range(2)]
        group.all_reduce(tensor)
        group.barrier()
        for stop in 2 * stops:
            stop()
        group.broadcast(tensor)
        assert [what is tensor for _, what in seen] == [True, True, False, False]  # each observer gets it
        assert all(call.finished is not None and call.finished >= call.started for call, _ in seen)
        return [call.name for call, _ in seen]

    assert run_ranks(2, body) == [["all_reduce", "all_reduce", "barrier", "barrier"]] * 2


def test_of_calls_that_a_call_makes_only_the_outermost_is_told() -> None:
    def body(group: ProcessGroup) -> list[str]:
        seen: list[str] = []
        stop = observe_calls(lambda call, _: seen.append(call.name) if call.group is group else None)
        group.reduce_scatter(torch.ones(group.rank + 1), [torch.ones(rank + 1) for rank in range(group.size)])
        stop()
        return seen

    assert run_ranks(2, body) == [["reduce_scatter"]] * 2


def test_the_end_of_a_call_in_flight_is_known_later_and_a_call_that_fails_is_not_told() -> None:
    def body(group: ProcessGroup) -> list[str]:
        seen: list[ObservedCall] = []
        stop = observe_calls(lambda call, _: seen.append(call) if call.group is group else None)
        with pytest.raises(Exception, match="expected a root"):
            group.broadcast(torch.ones(1), 7)
        work = group.all_reduce(torch.ones(2), async_op=True)
        stop()
        work.wait()
        end_s = time.monotonic() + 20
        while seen[0].finished is None and time.monotonic() < end_s:  # callbacks may run a little after `wait` returns
            time.sleep(0.001)
        assert seen[0].finished is not None
        return [call.name for call in seen]

    assert run_ranks(2, body) == [["all_reduce"]] * 2
