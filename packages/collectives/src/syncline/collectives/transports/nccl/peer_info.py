"""What each rank says when a group connects, and what speaks against connecting them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from ...startup.nodes import host_identity
from .rendezvous import Payload

#: Set to a text of its own on each rank, it lets several ranks share one GPU: NCCL takes them for ranks of different hosts,
#: which talk over sockets. A testing aid; slow, and not for training.
HOST_ID_VARIABLE = "NCCL_HOSTID"
#: Set to 1 on each rank, it lets them share a GPU as ranks of one host, with an NCCL of at least this version.
MULTI_RANK_VARIABLE, MULTI_RANK_VERSION = "NCCL_MULTI_RANK_GPU_ENABLE", (2, 30)


def peer_info(rank: int, pci_id: str, version: str) -> Payload:
    """What this process says.

    Args:
        rank: its rank in the default group.
        pci_id: of the GPU that it has chosen.
        version: of its NCCL.
    """
    identity = host_identity()
    return {
        "rank": rank,
        "host": f"{identity.hostname} {identity.boot_id}",
        "host_id": os.environ.get(HOST_ID_VARIABLE, ""),
        "hostname": socket.gethostname(),
        "pci_id": pci_id,
        "shares": os.environ.get(MULTI_RANK_VARIABLE) == "1" and _numbers(version) >= MULTI_RANK_VERSION,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "unset"),
        "version": version,
    }


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def find_conflict(peers: Sequence[Payload]) -> str | None:
    """Why these ranks cannot be connected, or None. A pure function."""
    return _one_gpu_twice(peers) or _two_versions(peers)


def _one_gpu_twice(peers: Sequence[Payload]) -> str | None:
    taken: dict[tuple[str, str, str], Payload] = {}
    for mine in peers:
        other = taken.setdefault((mine["host"], mine["host_id"], mine["pci_id"]), mine)
        if other is not mine and not (other["shares"] and mine["shares"]):
            return (
                f"ranks {other['rank']} and {mine['rank']} have both chosen the GPU {mine['pci_id']} of {mine['hostname']}, "
                "but NCCL needs one for each rank. Before the first collective, call "
                "torch.cuda.set_device(syncline.collectives.default_device()), or let the launcher show each rank its own by "
                "CUDA_VISIBLE_DEVICES (srun --gpus-per-task=1; it is "
                f"{other['visible']} on rank {other['rank']} and {mine['visible']} on rank {mine['rank']})"
            )
    return None


def _two_versions(peers: Sequence[Payload]) -> str | None:
    first = peers[0]
    for mine in peers:
        if mine["version"] != first["version"]:
            return (
                f"rank {first['rank']} on {first['hostname']} has NCCL {first['version']}, rank {mine['rank']} on "
                f"{mine['hostname']} has NCCL {mine['version']}; install one version on all nodes"
            )
    return None
