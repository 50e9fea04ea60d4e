"""Who is told of a group's calls, and of which."""

from __future__ import annotations

import pytest
import torch

from syncline.collectives import ProcessGroup
from syncline.collectives.contract.call_observer import ObservedCall, observe_calls
from syncline.collectives.testing import run_ranks

pytestmark = pytest.mark.ranks


def test_calls_are_told_until_it_is_stopped_also_such_as_have_a_plan() -> None:
    def body(group: ProcessGroup) -> list[str]:
        tensor = torch.ones(3)
        group.all_reduce(tensor)
        seen: list[ObservedCall] = []
        stop = observe_calls(lambda call: seen.append(call) if call.group is group else None)
        group.all_reduce(tensor)
        group.barrier()
        stop()
        stop()
        group.broadcast(tensor)
        assert [call.tensor is tensor for call in seen] == [True, False]
        assert all(call.finished is not None and call.finished >= call.started for call in seen)
        return [call.name for call in seen]

    assert run_ranks(2, body) == [["all_reduce", "barrier"]] * 2


def test_of_calls_that_a_call_makes_only_the_outermost_is_told() -> None:
    def body(group: ProcessGroup) -> list[str]:
        seen: list[str] = []
        stop = observe_calls(lambda call: seen.append(call.name) if call.group is group else None)
        group.reduce_scatter(torch.ones(group.rank + 1), [torch.ones(rank + 1) for rank in range(group.size)])
        stop()
        return seen

    assert run_ranks(2, body) == [["reduce_scatter"]] * 2


def test_the_end_of_a_call_in_flight_is_known_later_and_a_call_that_fails_is_not_told() -> None:
    def body(group: ProcessGroup) -> list[str]:
        seen: list[ObservedCall] = []
        stop = observe_calls(lambda call: seen.append(call) if call.group is group else None)
        with pytest.raises(Exception, match="expected a root"):
            group.broadcast(torch.ones(1), 7)
        group.all_reduce(torch.ones(2), async_op=True).wait()
        stop()
        assert seen[0].finished is not None
        return [call.name for call in seen]

    assert run_ranks(2, body) == [["all_reduce"]] * 2
