"""Where the ranks of a group are: which share a node, and which device each should use.

All of it comes from asking the group. Variables such as LOCAL_RANK are the launcher's view of the job; a group may be a part
of the job, may mix launchers, and is right also where none set anything.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import LaunchError
from .objects import exchange_objects
from .process_group import ProcessGroup
from .world import resolve_group

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostIdentity:
    """What tells one node from another.

    The name alone does not: unconfigured machines are all "localhost". The boot id alone does not either: containers with
    names of their own share it, and may share no memory and no devices.
    """

    hostname: str
    boot_id: str


@dataclass(frozen=True)
class Placement:
    """Where one rank of a group is.

    Attributes:
        local_rank: how many ranks of the group with a lower rank are on this node.
        local_world_size: how many ranks of the group are on this node.
        node: the number of this node, counted from 0 in the order of the nodes' lowest ranks.
        nodes: how many nodes the group spans.
        hostnames: for each rank of the group the name of its host.
        node_of: for each rank of the group the number of its node.
    """

    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    hostnames: tuple[str, ...]
    node_of: tuple[int, ...]

    def ranks_on_node(self, node: int) -> list[int]:
        """The ranks of the group on one node, in order."""
        return [rank for rank, number in enumerate(self.node_of) if number == node]


def placement_of(group: ProcessGroup | None = None) -> Placement:
    """Find out which ranks of a group share a node. A collective: every rank of the group calls it.

    Cost: an `exchange_objects` of some hundred bytes. Nothing is remembered; keep the result.

    Args:
        group: the default group if None.
    """
    chosen = resolve_group(group)
    return place(chosen.rank, exchange_objects(host_identity(), group=chosen))


def place(rank: int, identities: Sequence[HostIdentity]) -> Placement:
    """Where a rank is, given the host of every rank. A pure function."""
    numbers: dict[HostIdentity, int] = {}
    node_of = tuple(numbers.setdefault(identity, len(numbers)) for identity in identities)
    return Placement(
        local_rank=node_of[:rank].count(node_of[rank]),
        local_world_size=node_of.count(node_of[rank]),
        node=node_of[rank],
        nodes=len(numbers),
        hostnames=tuple(identity.hostname for identity in identities),
        node_of=node_of,
    )


def host_identity() -> HostIdentity:
    """The identity of the host that this process runs on."""
    return HostIdentity(socket.gethostname(), _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "")


def default_device(group: ProcessGroup | None = None) -> torch.device:
    """The device that this rank should compute on. A collective: every rank of the group calls it.

    It is the CPU where no rank of the node sees a CUDA device. Otherwise each rank of a node takes the first device that it
    sees and that no rank before it took: the device with its local rank where all see all, `cuda:0` where the launcher shows
    each rank a device of its own (`srun --gpus-per-task=1`).

    Args:
        group: the default group if None.

    Raises:
        LaunchError: a node has fewer devices than ranks, or shows some ranks none. Raised on every rank of that node.
    """
    chosen = resolve_group(group)
    seen = exchange_objects((host_identity(), _visible_devices()), group=chosen)
    placement = place(chosen.rank, [identity for identity, _ in seen])
    local_ranks = placement.ranks_on_node(placement.node)
    indices = assign_devices({rank: seen[rank][1] for rank in local_ranks}, placement.hostnames[chosen.rank])
    index = indices[chosen.rank]
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def assign_devices(visible: dict[int, Sequence[str]], hostname: str) -> dict[int, int | None]:
    """Which of its visible devices each rank of a node takes. A pure function.

    Args:
        visible: for each rank of one node the ids of the devices that it sees, in its order.
        hostname: the node, for messages.

    Returns:
        For each rank an index into its devices, or None for all of them if none sees a device.

    Raises:
        LaunchError: a rank finds no device that is left.
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


def _visible_devices() -> list[str]:
    """An id for each CUDA device that this process sees; the same device has the same id in every process of the node."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
