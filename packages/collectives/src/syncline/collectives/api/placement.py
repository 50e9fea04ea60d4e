"""Find out which ranks of a group share a node, and choose the device of each rank."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from ..errors import LaunchError
from ..group import ProcessGroup
from ..startup.nodes import Placement, from_words, host_identity, place
from .default_group import resolve_group
from .object_exchange import exchange_objects

_placements: weakref.WeakKeyDictionary[ProcessGroup, Placement] = weakref.WeakKeyDictionary()


def placement_of(group: ProcessGroup | None = None) -> Placement:
    """Find out where the ranks of a group run: which ranks share a node, and which local rank this process has.

    Every rank calls this function. For most groups, the call needs no communication. The first call is a
    collective for a group of torch.distributed, for a group that `shrink` or `admit` made, and for a sub-group of one of these.
    """
    chosen = resolve_group(group)
    found = _placements.get(chosen)
    if found is None:
        found = _placements[chosen] = _find(chosen)
    return found


def _find(group: ProcessGroup) -> Placement:
    if group.size == 1:
        return place(0, [host_identity()])
    # The ranks have not exchanged their hosts, for example in a group of torch, or in a group after a loss or an admission.
    if group.hosts is None:
        return place(group.rank, exchange_objects(host_identity(), group=group))
    return place(group.rank, [from_words(group.hosts[rank]) for rank in group.ranks])


def get_local_rank(group: ProcessGroup | None = None) -> int:
    """Return the local rank: this process's number among the ranks of the group that are on its node, from 0.

    In some groups the first call is a collective, so every rank must call this function; see `placement_of`.
    """
    return placement_of(group).local_rank


def get_local_size(group: ProcessGroup | None = None) -> int:
    """Return how many ranks of the group are on this process's node.

    In some groups the first call is a collective, so every rank must call this function; see `placement_of`.
    """
    return placement_of(group).local_world_size


def get_node_rank(group: ProcessGroup | None = None) -> int:
    """Return the number of this process's node among the nodes of the group, from 0. Nodes are ordered by their lowest rank.

    In some groups the first call is a collective, so every rank must call this function; see `placement_of`.
    """
    return placement_of(group).node


def default_device(group: ProcessGroup | None = None) -> torch.device:
    """Return the device that this rank should compute on. Every rank of the group calls this function.

    If no rank of the node sees a CUDA device, the result is the CPU. Otherwise, in the order of ranks, each rank of a node
    takes the first device that it sees and that no earlier rank has taken. So if all ranks see all devices, each rank takes the
    device with the number of its local rank. If each rank sees one device of its own (`srun --gpus-per-task=1`), each rank
    takes `cuda:0`.

    Raises:
        LaunchError: no device is left for a rank. For example, the node has fewer devices than ranks, or only some of its ranks
            see a device. Every rank of the node raises this error.
    """
    chosen = resolve_group(group)
    seen = exchange_objects((host_identity(), visible_devices()), group=chosen)
    placement = place(chosen.rank, [identity for identity, _ in seen])
    local_ranks = placement.ranks_on_node(placement.node)
    indices = assign_devices({rank: seen[rank][1] for rank in local_ranks}, placement.hostnames[chosen.rank])
    index = indices[chosen.rank]
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def assign_devices(visible: dict[int, Sequence[str]], hostname: str) -> dict[int, int | None]:
    """Choose for each rank of a node one of the devices that the rank sees. No two ranks get the same device. A pure function.

    Args:
        visible: for each rank of the node, the ids of the devices that the rank sees. Entry i of a rank's list is
            the id of its device `cuda:i`.
        hostname: the node's name in messages.

    Returns:
        For each rank an index into its devices; None for every rank if no rank sees a device.

    Raises:
        LaunchError: no device is left for a rank.
    """
    if not any(visible.values()):
        return dict.fromkeys(visible)
    taken: dict[str, int] = {}
    indices: dict[int, int | None] = {}
    for rank, devices in sorted(visible.items()):
        free = [index for index, device in enumerate(devices) if device not in taken]
        if not free:
            raise LaunchError(_no_device_left(rank, devices, visible, hostname))
        taken[devices[free[0]]] = rank
        indices[rank] = free[0]
    return indices


def _no_device_left(rank: int, devices: Sequence[str], visible: dict[int, Sequence[str]], hostname: str) -> str:
    ranks = ", ".join(map(str, sorted(visible)))
    different = len({device for shown in visible.values() for device in shown})
    return (
        f"rank {rank} finds no CUDA device that is left for it on {hostname}: it sees {len(devices)}, and the {len(visible)} "
        f"ranks there ({ranks}) together see {different}. Start at most as many ranks on a node as it has devices "
        "(--ntasks-per-node, mpirun's -N), show each rank one of its own (--gpus-per-task=1, or a wrapper that sets "
        "CUDA_VISIBLE_DEVICES), or choose the device yourself"
    )


def visible_devices() -> list[str]:
    """The ids of the CUDA devices that this process sees. A device has the same id in every process of the node."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
