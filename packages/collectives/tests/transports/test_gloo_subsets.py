"""Groups of some ranks over Gloo, which meet in the store of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from syncline.collectives import ProcessGroup
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.gloo import connect

pytestmark = pytest.mark.ranks


def test_a_name_that_was_used_before_may_be_used_again() -> None:
    """Also by other members, who do not know how often it was used."""
    store = dist.HashStore()

    def body(outer: ProcessGroup) -> list[float]:
        transport = connect(store, outer.rank, 3, "whole", CancelScope(20))
        group = HostGroup(transport, outer.rank, 3, name="whole", timeout_s=20)
        sums = []
        for members in ([0, 1], [0, 1], [1, 2]):
            if outer.rank in members:
                part = group.subset(members, "part")
                tensor = torch.ones(1)
                part.all_reduce(tensor)
                sums.append(tensor.item())
                part.close()
            outer.barrier()
        group.close()
        return sums

    assert run_ranks(3, body) == [[2.0, 2.0], [2.0, 2.0, 2.0], [2.0]]


def test_integers_of_other_types_name_the_same_members() -> None:
    store = dist.HashStore()

    def body(outer: ProcessGroup) -> float:
        transport = connect(store, outer.rank, 2, "whole", CancelScope(20))
        group = HostGroup(transport, outer.rank, 2, name="whole", timeout_s=20)
        part = group.subset([0, 1] if outer.rank == 0 else [np.int64(0), np.int64(1)], "part")
        tensor = torch.ones(1)
        part.all_reduce(tensor)
        part.close()
        group.close()
        return tensor.item()

    assert run_ranks(2, body) == [2.0, 2.0]
