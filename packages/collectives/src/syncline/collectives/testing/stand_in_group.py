"""Groups over NCCL without a GPU: the group's own logic, over the stand-ins."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from ..backends.nccl.connector import Connector
from ..backends.nccl.process_group import NcclGroup
from ..backends.nccl.rendezvous import MeetInGroup, MeetInStore
from ..contract.process_group import ProcessGroup
from .ranks import run_ranks
from .stand_in_accelerator import StandInAccelerator
from .stand_in_nccl import StandInNccl


def run_on_stand_ins(
    size: int,
    body: Callable[[NcclGroup], object],
    *,
    reproducible: bool = False,
    over_host_group: bool = False,
    timeout_s: float = 30.0,
    pci_id: Callable[[int], str] = "0000:{:02x}:00.0".format,
    accelerator: Callable[[str], StandInAccelerator] = StandInAccelerator,
) -> None:
    """Run `body(group)` on every rank of a group over NCCL; the ranks are threads, and their GPUs are threads, too.

    Args:
        size: number of ranks.
        body: called with the rank's group.
        reproducible: of the group.
        over_host_group: whether the ranks meet in a host group rather than in a store.
        timeout_s: of the group.
        pci_id: gives each rank its GPU.
        accelerator: makes that out of it.
    """
    nccl, store = StandInNccl(), dist.HashStore()

    def rank_of(outer: ProcessGroup) -> None:
        rendezvous = MeetInGroup(outer, owned=False) if over_host_group else MeetInStore(store)
        connector = Connector(nccl, accelerator(pci_id(outer.rank)), rendezvous, range(size), outer.rank, "ranks")
        group = NcclGroup(connector, timeout_s=timeout_s, reproducible=reproducible)
        try:
            body(group)
        except BaseException:
            group.abort()
            raise
        outer.barrier()
        group.close()

    run_ranks(size, rank_of)
