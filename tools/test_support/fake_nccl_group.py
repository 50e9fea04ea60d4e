"""Groups over NCCL without a GPU: the group's own code, over the fakes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from syncline.collectives.group import ProcessGroup
from syncline.collectives.testing.ranks import run_ranks
from syncline.collectives.transports.nccl.connections import Connector
from syncline.collectives.transports.nccl.group import NcclGroup
from syncline.collectives.transports.nccl.rendezvous import GroupRendezvous, StoreRendezvous

from .fake_device import FakeDevice
from .fake_nccl import FakeNccl


class NcclGroupOnFakes(NcclGroup):
    """A group in which tensors of the CPU stand in for those of a GPU."""

    @property
    def device_types(self) -> frozenset[str]:
        """Both."""
        return frozenset({"cpu", "cuda"})


def run_on_fakes(
    size: int,
    body: Callable[[NcclGroup], object],
    *,
    reproducible: bool = False,
    check_calls: bool = False,
    over_host_group: bool = False,
    timeout_s: float = 30.0,
    pci_id: Callable[[int], str] = "0000:{:02x}:00.0".format,
    runtime: Callable[[str], FakeDevice] = FakeDevice,
    lazily: bool = True,
    nccl: Any = None,
) -> None:
    """Run `body(group)` on every rank of a group over NCCL. Ranks are threads, and their GPUs are threads, too.

    Args:
        size: number of ranks.
        body: called with the rank's group.
        reproducible: for the group.
        check_calls: for the group.
        over_host_group: whether the ranks meet in a host group instead of a store.
        timeout_s: for the group.
        pci_id: gives each rank its GPU.
        runtime: makes the device from it.
        lazily: whether waits do not block, as on a GPU. Not if torch's C++ code reads the awaited data.
        nccl: the module to call; by default a `FakeNccl`.
    """
    library, store = nccl or FakeNccl(), dist.HashStore()

    def rank_of(outer: ProcessGroup) -> None:
        rendezvous = GroupRendezvous(outer, owned=False) if over_host_group else StoreRendezvous(store)
        device = runtime(pci_id(outer.rank))
        connector = Connector(library, device, rendezvous, range(size), outer.rank, "ranks")
        group = NcclGroupOnFakes(connector, timeout_s=timeout_s, reproducible=reproducible, check_calls=check_calls)
        try:
            with device.running() if lazily else nullcontext():
                body(group)
        except BaseException:
            group.abort()
            raise
        outer.barrier()
        group.close()

    run_ranks(size, rank_of)
