"""The public suite over the group's own logic: NCCL and the GPU are stood in for by threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from syncline.collectives import ProcessGroup
from syncline.collectives.backends.nccl.connector import Connector
from syncline.collectives.backends.nccl.process_group import NcclGroup
from syncline.collectives.backends.nccl.rendezvous import MeetInGroup, MeetInStore
from syncline.collectives.testing import CHECKS, run_ranks
from syncline.collectives.testing.conformance import refusals
from syncline.collectives.testing.stand_in_accelerator import StandInAccelerator
from syncline.collectives.testing.stand_in_nccl import StandInNccl

pytestmark = pytest.mark.ranks

HAS_TAGS = ("point_to_point_tags", "point_to_point_any_source", "point_to_point_futures")
ROUNDS_HALVES_ONCE = "all_reduce_halves_round_once"
THE_SUITE = [name for name in CHECKS if name not in HAS_TAGS]
each_size = pytest.mark.parametrize("size", [1, 2, 3])


def on_stand_ins(size: int, body: Callable[[NcclGroup], object], *, reproducible: bool = False) -> None:
    """Run `body` on every rank of a group over NCCL, of which each rank is a thread."""
    nccl, store = StandInNccl(), dist.HashStore()

    def rank_of(outer: ProcessGroup) -> None:
        rendezvous = MeetInGroup(outer, owned=False) if reproducible else MeetInStore(store)
        accelerator = StandInAccelerator(f"0000:{outer.rank:02x}:00.0")
        connector = Connector(nccl, accelerator, rendezvous, range(size), outer.rank, "ranks")
        group = NcclGroup(connector, timeout_s=30, reproducible=reproducible)
        try:
            body(group)
        except BaseException:
            group.abort()
            raise
        outer.barrier()
        group.close()

    run_ranks(size, rank_of)


@each_size
@pytest.mark.parametrize("name", THE_SUITE)
def test_the_suite(size: int, name: str) -> None:
    on_stand_ins(size, CHECKS[name], reproducible=name == ROUNDS_HALVES_ONCE)


@pytest.mark.parametrize("name", [name for name in CHECKS if name.startswith(("all_reduce", "reduce"))])
def test_reproducible(name: str) -> None:
    """Met over a host group, too."""
    on_stand_ins(3, CHECKS[name], reproducible=True)


@each_size
def test_refuses_calls_after_close(size: int) -> None:
    on_stand_ins(size, refusals.after_close)
