"""How communicators come into being: lazily, within a time limit, after all ranks have said which GPU they use."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch

from ...engine.cancel_scope import CancelScope, DetachedCall
from ...errors import CollectiveTimeout, DisagreementError
from .accelerator import Accelerator, CommStream
from .communicator import Communicator, mapped
from .library import version_in_words
from .peer_info import find_conflict, peer_info
from .rendezvous import Payload, Rendezvous

T = TypeVar("T")

logger = logging.getLogger("syncline.collectives")


@functools.cache  # once in each process
def warn_unverified() -> None:
    """Log that the backend has been tested with fakes only; to be removed when it has run on a GPU."""
    logger.warning(
        "NCCL is in use: this version has not been verified on a GPU. Its tests use fakes of NCCL and the GPU; compare the "
        "first steps of a training with those on one GPU before you rely on it"
    )


@dataclass(frozen=True)
class StreamCommunicator:
    """A communicator and the stream that it works on.

    Attributes:
        communicator: of all ranks of a group, or of two of them in one direction.
        comm_stream: its stream.
        device: the GPU of both.
        lock: held while something is issued, for NCCL allows one thread at a time.
    """

    communicator: Communicator
    comm_stream: CommStream
    device: torch.device
    lock: Lock = field(default_factory=Lock)


class Connector:
    """Connects some of the ranks of a job.

    Args:
        nccl: the module `cupy.cuda.nccl`, or a fake.
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

    def of_all(self, device: torch.device, scope: CancelScope) -> StreamCommunicator:
        """Connect all ranks of the group."""
        return self._connect("all", range(len(self.ranks)), device, scope)

    def of_two(self, peer: int, device: torch.device, scope: CancelScope) -> dict[tuple[int, int], StreamCommunicator]:
        """Connect with one other rank, once for each direction, by (sender, receiver).

        Two, so that a receive need not queue behind a send: two ranks may both send first.

        NCCL connects two ranks only at their first send and receive, and keeps the CPU until the other rank has made the
        matching call. If these were the user's calls, two ranks that both send first would wait for one another. So the first
        transfer of each direction is made here, a byte, in the same order on both ranks.
        """
        low, high = sorted((self.rank, peer))
        stream_comms = {}
        for direction in ((low, high), (high, low)):
            stream_comm = stream_comms[direction] = self._connect("{} to {}".format(*direction), direction, device, scope)
            self._within(scope, device, partial(self._send_a_byte, stream_comm))
        return stream_comms

    def split(
        self, stream_comm: StreamCommunicator, members: Sequence[int] | None, color: int | None, scope: CancelScope
    ) -> StreamCommunicator | None:
        """Connect a part of the ranks out of a communicator of all, who all call; None where this rank is in no part."""
        comm_stream = self.accelerator.comm_stream(stream_comm.device)
        made = self._within(
            scope, stream_comm.device, lambda: stream_comm.communicator.split(members, color, comm_stream.handle)
        )
        return None if made is None else StreamCommunicator(made, comm_stream, stream_comm.device)

    def part(self, members: Sequence[int], name: str) -> Connector:
        """The connector of a part of the group."""
        ranks = [self.ranks[member] for member in members]
        return Connector(self.nccl, self.accelerator, self.rendezvous, ranks, list(members).index(self.rank), name)

    def agree(self, topic: str, payload: Payload, decide: Callable[[list[Payload]], Payload], scope: CancelScope) -> Payload:
        """Let all ranks of the group agree on something, on the host."""
        return self._agree(topic, self.ranks, payload, decide, scope)

    def _agree(
        self, topic: str, ranks: Sequence[int], payload: Payload, decide: Callable[[list[Payload]], Payload], scope: CancelScope
    ) -> Payload:
        return self.rendezvous.agree(f"{self.name}/{topic}", ranks, self.ranks[self.rank], payload, decide, scope)

    def _connect(self, topic: str, members: Sequence[int], device: torch.device, scope: CancelScope) -> StreamCommunicator:
        with mapped(self.nccl, "ncclGetVersion"):
            version = version_in_words(self.nccl)
        mine = peer_info(self.ranks[self.rank], self.accelerator.pci_id(device), version)
        decision = self._agree(topic, [self.ranks[member] for member in members], mine, self._decide, scope)
        if "conflict" in decision:
            raise DisagreementError(f"group '{self.name}' cannot be connected: {decision['conflict']}")
        comm_stream = self.accelerator.comm_stream(device)
        unique_id, rank = bytes.fromhex(decision["unique_id"]), list(members).index(self.rank)
        made = self._within(
            scope, device, lambda: Communicator.connect(self.nccl, unique_id, rank, len(members), comm_stream.handle)
        )
        if self.ranks[self.rank] == 0:  # one rank of the job speaks for all
            warn_unverified()
        return StreamCommunicator(made, comm_stream, device)

    def _send_a_byte(self, stream_comm: StreamCommunicator) -> None:
        def body() -> None:
            byte = torch.empty(
                1, dtype=torch.uint8, device=stream_comm.device
            )  # any: a kernel to fill it might wait for the GPU
            if stream_comm.communicator.rank == 0:
                stream_comm.communicator.send(byte, 1)
            else:
                stream_comm.communicator.recv(byte, 0)

        stream_comm.comm_stream.run(body, self.accelerator.now(stream_comm.device))

    def _decide(self, peers: list[Payload]) -> Payload:
        found = find_conflict(peers)
        if found is not None:
            return {"conflict": found}
        with mapped(self.nccl, "ncclGetUniqueId"):
            return {"unique_id": bytes(self.nccl.get_unique_id()).hex()}

    def _within(self, scope: CancelScope, device: torch.device, connect: Callable[[], T]) -> T:
        detached = DetachedCall(connect, partial(self.accelerator.background, device), "syncline-nccl-connect")
        if not detached.done.wait(scope.remaining_s()):
            raise CollectiveTimeout(
                f"NCCL did not connect the ranks of group '{self.name}' within {scope.timeout_s:g} s, although all came; "
                "NCCL_DEBUG=INFO shows what it tries (NCCL_SOCKET_IFNAME chooses the network)"
            )
        return detached.result()
