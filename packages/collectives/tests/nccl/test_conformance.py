"""The public suite over the group's own logic: NCCL and the GPU are stood in for by threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import ProcessGroup
from syncline.collectives.backends.nccl.connector import Connector
from syncline.collectives.backends.nccl.process_group import NcclGroup
from syncline.collectives.backends.nccl.rendezvous import MeetInGroup, MeetInStore
from syncline.collectives.testing import CHECKS, Check, run_ranks
from syncline.collectives.testing.conformance import refusals
from syncline.collectives.testing.stand_in_accelerator import StandInAccelerator
from syncline.collectives.testing.stand_in_nccl import StandInNccl

pytestmark = pytest.mark.ranks


def on_stand_ins(size: int, body: Callable[[NcclGroup], object], *, reproducible: bool = False) -> None:
    """Run `body` on every rank of a group over NCCL, of which each rank is a thread."""
    nccl, store = StandInNccl(), dist.HashStore()

    def rank_of(outer: ProcessGroup) -> None:
        accelerator = StandInAccelerator(f"0000:{outer.rank:02x}:00.0")
        connector = Connector(nccl, accelerator, MeetInStore(store), range(size), outer.rank, "ranks")
        group = NcclGroup(connector, timeout_s=30, reproducible=reproducible)
        try:
            body(group)
        except BaseException:
            group.abort()
            raise
        outer.barrier()
        group.close()

    run_ranks(size, rank_of)


@pytest.mark.parametrize("size", (1, 2, 3, 4))
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_suite(size: int, check: Check) -> None:
    on_stand_ins(size, check)
