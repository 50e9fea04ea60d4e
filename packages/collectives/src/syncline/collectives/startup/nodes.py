"""Find out which ranks share a node, from the identity of each rank's host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostIdentity:
    """The identity of a node: host name and boot id.

    The name alone is not enough, because many machines are called "localhost". The boot id alone is not enough, because
    containers on one machine may share no memory and no devices.
    """

    hostname: str
    boot_id: str


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a group run: the local rank of this rank, and the node of every rank.

    Nodes are numbered from 0 in the order of their lowest ranks.

    Attributes:
        local_rank: the number of this rank among the ranks of the group on its node, from 0.
        local_world_size: how many ranks of the group are on the node of this rank.
        node: the number of the node of this rank.
        nodes: how many nodes the group spans.
        hostnames: for each rank of the group, the host's name.
        node_of: for each rank of the group, the node's number.
    """

    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    hostnames: tuple[str, ...]
    node_of: tuple[int, ...]

    def ranks_on_node(self, node: int) -> list[int]:
        """Return the ranks of the group that run on node number `node`, in ascending order."""
        return [rank for rank, number in enumerate(self.node_of) if number == node]


def place(rank: int, identities: Sequence[HostIdentity]) -> Placement:
    """Return the placement of a rank. `identities` has the identity of each rank's host, in the order of the ranks."""
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


def in_words(host: HostIdentity) -> str:
    """Encode an identity as one text, which `from_words` decodes."""
    return f"{host.boot_id} {host.hostname}"


def from_words(text: str) -> HostIdentity:
    """Decode an identity from the text that `in_words` made."""
    boot_id, hostname = text.split(" ", 1)
    return HostIdentity(hostname, boot_id)


def host_identity() -> HostIdentity:
    """Return the identity of the host that this process runs on."""
    return HostIdentity(socket.gethostname(), _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "")
