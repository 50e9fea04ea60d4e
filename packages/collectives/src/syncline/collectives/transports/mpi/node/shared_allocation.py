"""Make memory that the ranks of each node share. Either all nodes get this memory, or no node gets it."""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TypeVar

import torch
from mpi4py import MPI

from ...shared_memory.memory_limit import Limit, Room, memory_limits, room_for_each
from ...shared_memory.segment import FdServer, Segment, create_file, open_peer_fd, padded, receive_fd, request_fd, reserve
from ..library import mpi_errors
from ..sync import Run, all_gather_objects
from .hierarchy import Hierarchy

_T = TypeVar("_T")


class SharedMemoryError(Exception):
    """Shared memory cannot be made. All ranks of the group raise this error. The message names the rank and the reason."""


def allocate_shared(hierarchy: Hierarchy, communicator: MPI.Intracomm, part_bytes: int, run: Run) -> Segment:
    """Make memory with a part of `part_bytes` bytes for each rank of a node. Every rank of the group calls this function.

    `communicator` has all ranks of the group. `run` runs an MPI operation to its end.

    Raises:
        SharedMemoryError: a rank did not get the memory. All ranks raise this error.
    """
    allocation = _Allocation(hierarchy.node, part_bytes, run)
    try:
        segment = allocation.segment()
        _agree(communicator, allocation.problem(), run)  # afterwards no rank needs the descriptor of the file
    finally:
        allocation.close()
    assert segment is not None
    return segment


class _Allocation:
    """One rank's steps to make a file that all ranks of its node share.

    If a step fails on a rank, the rank still takes part in all later collectives, and reports its problem afterwards.
    """

    def __init__(self, node: MPI.Intracomm, part_bytes: int, run: Run) -> None:
        self._run = run
        self._problems: list[str] = []
        self._node = node
        self._part_bytes = part_bytes
        self._is_first = node.Get_rank() == 0
        self._file = -1

    def segment(self) -> Segment | None:
        origin = self._create()
        if origin is not None and self._open(*origin):
            with self._recording():
                # Each rank reserves its own part, so the part's memory is close to the rank's core.
                reserve(self._file, self._part_bytes, self._node.Get_rank())
                segment = Segment(self._file, self._node.Get_size(), self._part_bytes, self._node.Get_rank())
                segment.use_huge_pages()
                return segment
        return None

    def problem(self) -> str:
        return "; ".join(self._problems)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def _create(self) -> tuple[int, int, str] | None:
        """Make the file on the first rank. On all ranks, return the first rank's process id and the file's descriptor and name.

        Return None on all ranks if the file cannot be made.
        """
        limits: list[Limit] = []
        with self._recording():
            limits = memory_limits()
        # Send plain tuples: a pickled class contains the path of its module, and the longer message needs one more packet.
        everybodys = [[Limit._make(limit) for limit in own] for own in self._all_gather([tuple(limit) for limit in limits])]
        name = f"syncline-{os.urandom(8).hex()}"
        if self._is_first:
            with self._recording():
                # Check before any rank takes memory: a process that exceeds a container's limit is killed without an error.
                _check_room(room_for_each(everybodys), padded(self._part_bytes))
                self._file = create_file(name, self._node.Get_size() * padded(self._part_bytes))
        return self._all_gather(None if self._file < 0 else (os.getpid(), self._file, name))[0]

    def _open(self, pid: int, file: int, name: str) -> bool:
        """Open the file through /proc of the first rank, or get its descriptor over a socket. Return whether this worked."""
        if not self._is_first:
            with self._recording():
                self._file = open_peer_fd(pid, file, name)
        requests = sum(self._all_gather(self._file < 0))
        # Some ranks cannot use /proc of the first rank, for example in containers without a common namespace.
        if requests:
            self._pass_fd(requests)
        return self._file >= 0

    def _pass_fd(self, requests: int) -> None:
        with ExitStack() as stack:
            server, connection = None, None
            if self._is_first:
                with self._recording():
                    server = stack.enter_context(closing(FdServer(self._file, requests)))
            where = self._all_gather(None if server is None else (server.address, server.token))[0]
            # Only ranks that could not open the file ask for it.
            if self._file < 0 and where is not None:
                with self._recording():
                    connection = stack.enter_context(request_fd(*where))
            self._all_gather(None)  # from here on, all clients have connected and sent, so `serve` need not wait
            if server is not None:
                with self._recording():
                    server.serve()
            if connection is not None:
                with self._recording():
                    self._file = receive_fd(connection)
                    self._problems.clear()  # this way has worked, so the failure of the first way does not matter

    def _all_gather(self, mine: _T) -> list[_T]:
        return all_gather_objects(self._node, mine, self._run)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - `_agree` tells all ranks
            self._problems.append(str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")


def _check_room(room: Room | None, part_bytes: int) -> None:
    if room is not None and part_bytes > room.each_bytes:
        raise OSError(
            errno.ENOMEM,
            f"no room for {part_bytes:,} bytes of each rank: {room.limit.name} leaves {room.each_bytes:,} for each of the "
            f"{room.sharers} rank(s) under it",
        )


def _agree(communicator: MPI.Intracomm, problem: str, run: Run) -> None:
    """Raise an error on all ranks if any rank has a problem. All ranks call this function.

    Cost: one reduction. If any rank has a problem, also an all-gather of the ranks' texts.
    """
    is_any = array("q", [bool(problem)])
    run(lambda: communicator.Iallreduce(MPI.IN_PLACE, [is_any, MPI.INT64_T], MPI.MAX))
    if is_any[0]:
        said = enumerate(all_gather_objects(communicator, problem, run))
        found = [f"rank {rank}: {text}" for rank, text in said if text]
        raise SharedMemoryError(found[0] if len(found) == 1 else f"{found[0]} (and {len(found) - 1} more rank(s))")


def probe_shared_memory() -> str:
    """Test shared memory: each rank reads data from the other ranks of its node. Every rank of the job calls this function.

    Return the result as text, equal on all ranks. The text begins with "yes" or "no", or with "nothing" if every rank is alone
    on its node.
    """
    with mpi_errors():
        communicator = MPI.COMM_WORLD.Dup()
        hierarchy = Hierarchy(communicator)
        try:
            return _result(hierarchy, communicator)
        finally:
            for made in (hierarchy.inter_node, hierarchy.node, communicator):
                if made is not None:
                    made.Free()


def _result(hierarchy: Hierarchy, communicator: MPI.Intracomm) -> str:
    if not hierarchy.shares_memory:
        return "nothing to share: every rank is alone on its node"
    try:
        segment = allocate_shared(hierarchy, communicator, torch.int64.itemsize, lambda start: start().Wait())
    except SharedMemoryError as error:
        return f"no: {error}"
    segment.view(segment.mine, 0, 1, torch.int64).fill_(communicator.Get_rank())
    written = hierarchy.node.allgather(communicator.Get_rank())
    read = [int(segment.view(rank, 0, 1, torch.int64).item()) for rank in range(len(written))]
    wrong = [rank for rank, is_wrong in enumerate(communicator.allgather(read != written)) if is_wrong]
    return (
        f"no: rank(s) {wrong} did not read what others wrote"
        if wrong
        else "yes: each rank read what the others of its node wrote"
    )
