"""`check_calls`: ranks that call different collectives are told, also by a backend that does not compare them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.collectives import DisagreementError, MisuseError, ProcessGroup
from syncline.collectives.engine.call import Call, Signature
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import InProcessTransport, SharedState, create_groups

pytestmark = pytest.mark.ranks


class Trusting(InProcessTransport):
    """Does not compare the calls, as Gloo does not."""

    compares_every_call = False

    def _meet(self, call: Call, value: Any) -> list[Any]:
        return super()._meet(Call(Signature("anything"), scope=call.scope), value)


def on_two_ranks(body: Callable[[ProcessGroup], object], *, check_calls: bool = True) -> None:
    shared_state = SharedState(2)

    def rank_body(outer: ProcessGroup) -> None:
        transport = Trusting(shared_state, outer.rank)
        body(HostGroup(transport, outer.rank, 2, timeout_s=10, check_calls=check_calls))

    run_ranks(2, rank_body)


CALLS = {
    "all_reduce(float32[3], op=SUM)": lambda group: group.all_reduce(torch.ones(3)),
    "all_reduce(float32[2], op=SUM)": lambda group: group.all_reduce(torch.ones(2)),
    "all_reduce(float64[3], op=SUM)": lambda group: group.all_reduce(torch.ones(3).double()),
    "broadcast(float32[3], root=0)": lambda group: group.broadcast(torch.ones(3)),
    "broadcast(float32[3], root=1)": lambda group: group.broadcast(torch.ones(3), 1),
    "barrier()": lambda group: group.barrier(),
}


@pytest.mark.parametrize("second", list(CALLS)[1:])
def test_both_calls_are_named(second: str) -> None:
    first = next(iter(CALLS))

    def body(group: ProcessGroup) -> None:
        with pytest.raises(DisagreementError) as caught:
            CALLS[(first, second)[group.rank]](group)
        assert f"\n  rank 0: {first}\n  rank 1: {second}" in str(caught.value)
        group.abort()

    on_two_ranks(body)


def test_without_it_nobody_notices() -> None:
    def body(group: ProcessGroup) -> None:
        tensor = torch.ones(3)
        group.all_reduce(tensor) if group.rank == 0 else group.broadcast(tensor)

    on_two_ranks(body, check_calls=False)


def test_equal_calls_go_through_also_in_subgroups() -> None:
    def body(group: ProcessGroup) -> None:
        tensor = torch.full((3,), group.rank + 1.0)
        group.all_reduce(tensor, async_op=True).wait()
        part = group.split(0)
        assert part is not None
        part.broadcast(tensor)
        assert tensor.tolist() == [3.0] * 3
        with pytest.raises(DisagreementError, match=r"rank 0: reduce\(float32\[3\], op=SUM, root=0\)\n  rank 1: barrier\(\)"):
            part.reduce(tensor) if group.rank == 0 else part.barrier()
        part.abort()
        group.close()

    on_two_ranks(body)


def test_the_older_name_of_the_comparison_says_the_new_one() -> None:
    (group,) = create_groups(1)
    with pytest.raises(MisuseError, match="agree_on_calls"):
        group.verify_calls()
