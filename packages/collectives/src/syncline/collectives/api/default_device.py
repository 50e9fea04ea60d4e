"""Which device each rank of a group should compute on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import LaunchError
from ..group import ProcessGroup
from ..startup.nodes import host_identity, place
from .default_group import resolve_group
from .object_exchange import exchange_objects


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
