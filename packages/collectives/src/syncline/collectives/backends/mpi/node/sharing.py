"""Making memory that the ranks of each node share: on all nodes, or nowhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TypeVar

from mpi4py import MPI

from ..objects import Run, all_gather
from .handover import Offer, ask, open_file, receive
from .hierarchy import Hierarchy
from .memory_limit import Limit, Room, memory_limits, room_for_each
from .segment import Segment, create_file, padded, reserve

_T = TypeVar("_T")


class SharingError(Exception):
    """The memory cannot be had. All ranks of the group raise it together; it says where and why."""


def share(hierarchy: Hierarchy, communicator: MPI.Intracomm, part_bytes: int, run: Run) -> Segment:
    """Memory with a part for each rank of a node. All ranks of the group call it.

    Args:
        hierarchy: of the group.
        communicator: of the group.
        part_bytes: for each rank.
        run: an MPI operation, to its end.

    Raises:
        SharingError: a rank did not get it.
    """
    attempt = _Attempt(hierarchy.node, part_bytes, run)
    try:
        segment = attempt.segment()
        _agree(
            all_gather(communicator, attempt.complaint(), run)
        )  # from here on nobody needs the descriptor of the rank that made the file
    finally:
        attempt.close()
    assert segment is not None
    return segment


class _Attempt:
    """One rank's part in making a file that all ranks of its node have.

    Whatever goes wrong on a rank, it takes part in everything that the others wait in, and complains afterwards.

    Args:
        node: its ranks.
        part_bytes: for each of them.
        run: an MPI operation, to its end.
    """

    def __init__(self, node: MPI.Intracomm, part_bytes: int, run: Run) -> None:
        self._run = run
        self._complaints: list[str] = []
        self._node = node
        self._part_bytes = part_bytes
        self._is_first = node.Get_rank() == 0
        self._file = -1

    def segment(self) -> Segment | None:
        """Each rank reserves its own part, whose pages so lie in the memory next to its core. None if something went wrong."""
        origin = self._create()
        if origin is not None and self._open(*origin):
            with self._complaining():
                reserve(self._file, self._part_bytes, self._node.Get_rank())
                segment = Segment(self._file, self._node.Get_size(), self._part_bytes, self._node.Get_rank())
                segment.use_huge_pages()
                return segment
        return None

    def complaint(self) -> str:
        """What went wrong on this rank, or nothing."""
        return "; ".join(self._complaints)

    def close(self) -> None:
        """Give the descriptor back."""
        if self._file >= 0:
            os.close(self._file)

    def _create(self) -> tuple[int, int, str] | None:
        """The first rank makes the file, if there is room for it. Where it is, on all ranks of the node, or None."""
        limits: list[Limit] = []
        with self._complaining():
            limits = memory_limits()
        everybodys = self._all_gather(limits)
        name = f"syncline-{os.urandom(8).hex()}"
        if self._is_first:
            with self._complaining():
                _check_room(room_for_each(everybodys), padded(self._part_bytes))
                self._file = create_file(name, self._node.Get_size() * padded(self._part_bytes))
        return self._all_gather(None if self._file < 0 else (os.getpid(), self._file, name))[0]

    def _open(self, pid: int, file: int, name: str) -> bool:
        """The other ranks open the file where the first one has it, or are handed it."""
        if not self._is_first:
            with self._complaining():
                self._file = open_file(pid, file, name)
        askers = sum(self._all_gather(self._file < 0))
        if askers:
            self._hand_over(askers)
        return self._file >= 0

    def _hand_over(self, askers: int) -> None:
        """The second way, if some rank could not go the first."""
        with ExitStack() as stack:
            offer, connection = None, None
            if self._is_first:
                with self._complaining():
                    offer = stack.enter_context(closing(Offer(self._file, askers)))
            where = self._all_gather(None if offer is None else (offer.address, offer.token))[0]
            if self._file < 0 and where is not None:
                with self._complaining():
                    connection = stack.enter_context(ask(*where))
            self._all_gather(None)  # all who ask have asked
            if offer is not None:
                with self._complaining():
                    offer.serve()
            if connection is not None:
                with self._complaining():
                    self._file = receive(connection)
                    self._complaints.clear()

    def _all_gather(self, mine: _T) -> list[_T]:
        return all_gather(self._node, mine, self._run)

    @contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - all ranks hear of it
            self._complaints.append(str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")


def _check_room(room: Room | None, part_bytes: int) -> None:
    if room is not None and part_bytes > room.each_bytes:
        raise OSError(
            errno.ENOMEM,
            f"no room for {part_bytes:,} bytes of each rank: {room.limit.name} leaves {room.each_bytes:,} for each of the "
            f"{room.sharers} rank(s) under it",
        )


def _agree(complaints: Sequence[str]) -> None:
    found = [f"rank {rank}: {said}" for rank, said in enumerate(complaints) if said]
    if found:
        raise SharingError(found[0] if len(found) == 1 else f"{found[0]} (and {len(found) - 1} more rank(s))")
