"""The functional forms on a group that is given, whose ranks have other numbers in the job."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from syncline.collectives import InvalidArgumentError, ProcessGroup
from syncline.collectives.api import functional
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import InProcessTransport, SharedState

pytestmark = pytest.mark.ranks

RANKS = [4, 7]  # in the job


def on_two_of_more(body: Callable[[ProcessGroup], None]) -> None:
    shared_state = SharedState(2)

    def rank_body(outer: ProcessGroup) -> None:
        body(HostGroup(InProcessTransport(shared_state, outer.rank), outer.rank, 2, timeout_s=10, ranks=RANKS))

    run_ranks(2, rank_body)


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("by_job", [False, True])
def test_roots_are_ranks_of_the_job_or_of_the_group(root: int, by_job: bool) -> None:
    src = {"src": RANKS[root]} if by_job else {"group_src": root}
    dst = {"dst": RANKS[root]} if by_job else {"group_dst": root}

    def body(group: ProcessGroup) -> None:
        mine, other = group.rank + 1.0, torch.zeros(3)
        tensor = torch.full((3,), mine)
        functional.broadcast(tensor, group=group, **src)
        assert tensor.tolist() == [root + 1.0] * 3
        tensor = torch.full((3,), mine)
        functional.reduce(tensor, group=group, **dst)
        assert tensor.tolist() == [3.0 if group.rank == root else mine] * 3
        outputs = [torch.zeros(3), torch.zeros(3)] if group.rank == root else None
        functional.gather(torch.full((3,), mine), outputs, group=group, **dst)
        assert outputs is None or [output[0].item() for output in outputs] == [1.0, 2.0]
        inputs = [torch.full((3,), 10.0 * (root + 1) + rank) for rank in (0, 1)] if group.rank == root else None
        functional.scatter(other, inputs, group=group, **src)
        assert other.tolist() == [10.0 * (root + 1) + group.rank] * 3
        assert [f"root={root}" in record.words for record in group.recorder.records()] == [True] * 4  # type: ignore[attr-defined]

    on_two_of_more(body)


def test_a_rank_that_is_not_in_the_group_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match="1"):
            functional.broadcast(torch.ones(3), src=1, group=group)

    on_two_of_more(body)
