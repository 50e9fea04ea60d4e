"""How communicators come into being: lazily, within a time limit, after all ranks have said which GPU they use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ...deadline import Deadline
from ...errors import CollectiveTimeout, DisagreementError
from .accelerator import Accelerator, Lane
from .claims import claim, objection
from .communicator import Communicator, mapped
from .library import version_in_words
from .rendezvous import Rendezvous, Words

T = TypeVar("T")


@dataclass(frozen=True)
class Link:
    """A communicator and the stream that it works on."""

    communicator: Communicator
    lane: Lane
    device: torch.device


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
        """
        low, high = sorted((self.rank, peer))
        return {
            (sender, receiver): self._connect(f"{sender} to {receiver}", (sender, receiver), device, deadline)
            for sender, receiver in ((low, high), (high, low))
        }

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

    def _decide(self, claims: list[Words]) -> Words:
        found = objection(claims)
        if found is not None:
            return {"objection": found}
        with mapped(self.nccl, "ncclGetUniqueId"):
            return {"unique_id": bytes(self.nccl.get_unique_id()).hex()}

    def _within(self, deadline: Deadline, device: torch.device, connect: Callable[[], T]) -> T:
        """NCCL waits for the other ranks without end, and cannot be asked to stop: so a thread waits, and is left behind."""
        attempt = _Attempt(connect, lambda: self.accelerator.use(device))
        attempt.start()
        if not attempt.done.wait(deadline.remaining_s()):
            raise CollectiveTimeout(
                f"NCCL did not connect the ranks of group '{self.name}' within {deadline.timeout_s:g} s, although all came; "
                "NCCL_DEBUG=INFO shows what it tries (NCCL_SOCKET_IFNAME chooses the network)"
            )
        return attempt.result()


class _Attempt(Generic[T]):
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], T], context: Callable[[], Any]) -> None:
        self._call = call
        self._context = context
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.done = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="syncline-nccl-connect", daemon=True).start()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        try:
            with self._context():
                self._result.append(self._call())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            self._error = error
        self.done.set()
