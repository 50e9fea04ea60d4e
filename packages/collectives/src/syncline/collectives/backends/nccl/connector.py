"""How communicators come into being: lazily, within a time limit, after all ranks have said which GPU they use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch

from ...contract.deadline import Deadline
from ...errors import CollectiveTimeout, DisagreementError
from .accelerator import Accelerator, Lane
from .attempt import Attempt
from .claims import claim, objection
from .communicator import Communicator, mapped
from .library import version_in_words
from .rendezvous import Rendezvous, Words

T = TypeVar("T")


@dataclass(frozen=True)
class Link:
    """A communicator and the stream that it works on.

    Attributes:
        communicator: of all ranks of a group, or of two of them in one direction.
        lane: its stream.
        device: the GPU of both.
        lock: held while something is issued, for NCCL allows one thread at a time.
    """

    communicator: Communicator
    lane: Lane
    device: torch.device
    lock: Lock = field(default_factory=Lock)


class Connector:
    """Connects some of the ranks of a job.

    Args:
        nccl: the module `cupy.cuda.nccl`, or a stand-in.
        accelerator: the GPUs.
        rendezvous: where the ranks of the job meet.
        ranks: those of the group, as ranks of the job.
        rank: this process's, in the group.
        name: the group's.
    """

    def __init__(
        self, nccl: Any, accelerator: Accelerator, rendezvous: Rendezvous, ranks: Sequence[int], rank: int, name: str
    ) -> None:
        self.nccl = nccl
        self.accelerator = accelerator
        self.rendezvous = rendezvous
        self.ranks = list(ranks)
        self.rank = rank
        self.name = name

    def of_all(self, device: torch.device, deadline: Deadline) -> Link:
        """Connect all ranks of the group."""
        return self._connect("all", range(len(self.ranks)), device, deadline)

    def of_two(self, peer: int, device: torch.device, deadline: Deadline) -> dict[tuple[int, int], Link]:
        """Connect with one other rank, once for each direction, by (sender, receiver).

        Two, so that a receive need not queue behind a send: two ranks may both send first.

        NCCL connects two ranks only at their first send and receive, and keeps the CPU until the other rank has made the
        matching call. If these were the user's calls, two ranks that both send first would wait for one another. So the first
        transfer of each direction is made here, a byte, in the same order on both ranks.
        """
        low, high = sorted((self.rank, peer))
        links = {}
        for direction in ((low, high), (high, low)):
            link = links[direction] = self._connect("{} to {}".format(*direction), direction, device, deadline)
            self._within(deadline, device, partial(self._send_a_byte, link))
        return links

    def split(self, link: Link, members: Sequence[int] | None, color: int | None, deadline: Deadline) -> Link | None:
        """Connect a part of the ranks out of a communicator of all, who all call; None where this rank is in no part."""
        lane = self.accelerator.lane(link.device)
        made = self._within(deadline, link.device, lambda: link.communicator.split(members, color, lane.handle))
        return None if made is None else Link(made, lane, link.device)

    def part(self, members: Sequence[int], name: str) -> Connector:
        """The connector of a part of the group."""
        ranks = [self.ranks[member] for member in members]
        return Connector(self.nccl, self.accelerator, self.rendezvous, ranks, list(members).index(self.rank), name)

    def agree(self, topic: str, words: Words, decide: Callable[[list[Words]], Words], deadline: Deadline) -> Words:
        """Let all ranks of the group agree on something, on the host."""
        return self._agree(topic, self.ranks, words, decide, deadline)

    def _agree(
        self, topic: str, ranks: Sequence[int], words: Words, decide: Callable[[list[Words]], Words], deadline: Deadline
    ) -> Words:
        return self.rendezvous.agree(f"{self.name}/{topic}", ranks, self.ranks[self.rank], words, decide, deadline)

    def _connect(self, topic: str, members: Sequence[int], device: torch.device, deadline: Deadline) -> Link:
        with mapped(self.nccl, "ncclGetVersion"):
            version = version_in_words(self.nccl)
        mine = claim(self.ranks[self.rank], self.accelerator.pci_id(device), version)
        decision = self._agree(topic, [self.ranks[member] for member in members], mine, self._decide, deadline)
        if "objection" in decision:
            raise DisagreementError(f"group '{self.name}' cannot be connected: {decision['objection']}")
        lane = self.accelerator.lane(device)
        unique_id, rank = bytes.fromhex(decision["unique_id"]), list(members).index(self.rank)
        made = self._within(
            deadline, device, lambda: Communicator.connect(self.nccl, unique_id, rank, len(members), lane.handle)
        )
        return Link(made, lane, device)

    def _send_a_byte(self, link: Link) -> None:
        def body() -> None:
            byte = torch.empty(1, dtype=torch.uint8, device=link.device)  # any: a kernel to fill it might wait for the GPU
            if link.communicator.rank == 0:
                link.communicator.send(byte, 1)
            else:
                link.communicator.recv(byte, 0)

        link.lane.run(body, self.accelerator.now(link.device))

    def _decide(self, claims: list[Words]) -> Words:
        found = objection(claims)
        if found is not None:
            return {"objection": found}
        with mapped(self.nccl, "ncclGetUniqueId"):
            return {"unique_id": bytes(self.nccl.get_unique_id()).hex()}

    def _within(self, deadline: Deadline, device: torch.device, connect: Callable[[], T]) -> T:
        attempt = Attempt(connect, partial(self.accelerator.background, device), "syncline-nccl-connect")
        if not attempt.done.wait(deadline.remaining_s()):
            raise CollectiveTimeout(
                f"NCCL did not connect the ranks of group '{self.name}' within {deadline.timeout_s:g} s, although all came; "
                "NCCL_DEBUG=INFO shows what it tries (NCCL_SOCKET_IFNAME chooses the network)"
            )
        return attempt.result()
