"""`Segment`: memory that the ranks of a node share. A file descriptor gives access to this memory."""

from __future__ import annotations

import hmac
import mmap
import os
import socket

import torch
from typing_extensions import override

from ...forks import Inherited, tell_in_forks
from .os_memory import collapse, create_memory_file, huge_page_bytes, map_over, map_zeros_over, move_pages, update

# The longest time that an allocation waits for huge pages.
HUGE_PAGES_SECONDS = 1.0
# The longest time that a rank waits for the descriptor of another rank's file.
_REQUEST_TIMEOUT_S = 10.0
_TOKEN_BYTES = 16


def padded(nbytes: int) -> int:
    """Round up to a multiple of the page size, so that no page (and no cache line) belongs to two ranks."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Segment(mmap.mmap, Inherited):
    """Memory with one part for each rank of a node, mapped into this process. Each part has its own pages.

    ::

        part of rank 0       | part of rank 1       | part of rank 2       |
        ^ offset 0             ^ offset 0             ^ offset 0

    The memory exists as long as any rank has this object, or a tensor from `view`. The segment keeps no descriptor open.

    Note [Segments in a fork]
    ~~~~~~~~~~~~~~~~~~~~~~~~~
    A forked child inherits the mapping. The other ranks would see the data that the child writes. So the child replaces the
    shared pages by private pages with zeros, at the same address.

    If this rank's part holds tensors of the user (`holds_tensors`), the child must see these tensors as they were at the fork.
    The kernel has no copy-on-write for shared pages. So before each fork, the parent updates a copy of the part in private
    memory. In the child, the pages of this copy then replace the pages with zeros.

    Cost: before a fork, the parent compares the part with the copy, and copies the part if it has changed. The copy needs as
    much memory as the part. The parent and its forked children share this memory until a process writes to it.

    Attributes:
        lead_bytes: the number of mapped bytes before the first part.
        holds_tensors: whether this rank's part holds tensors of the user.

    Args:
        file: a descriptor of a file with room for `parts` padded parts. The caller may close it afterwards.
        mine: the number of this rank's part.
    """

    mine: int
    parts: int
    part_bytes: int
    lead_bytes: int
    holds_tensors: bool
    _copy: mmap.mmap | None

    def __new__(cls, file: int, parts: int, part_bytes: int, mine: int) -> Segment:  # noqa: D102 - the class says it
        nbytes = parts * padded(part_bytes)
        alignment = huge_page_bytes() if nbytes >= huge_page_bytes() else 0
        # Python's mmap keeps a descriptor for each file. So map memory without a file, and map the file over it below.
        # This mapping is private. So after `map_over`, only its unused memory before and after the file counts as committed.
        segment = super().__new__(cls, -1, alignment + nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        segment.parts = parts
        segment.part_bytes = part_bytes
        segment.mine = mine
        segment.lead_bytes = 0
        segment.holds_tensors = False
        segment._copy = None
        if alignment:
            segment.lead_bytes = -segment._address_of(0) % alignment
        map_over(segment._address_of(0), nbytes, file)
        tell_in_forks(segment)
        return segment

    @override
    def before_fork(self) -> None:
        if self.holds_tensors:
            size = padded(self.part_bytes)
            # The copy lives as long as the segment, so later forks only update it.
            if self._copy is None:
                self._copy = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            update(_address(self._copy), self.address(), size)

    @override
    def in_fork(self) -> None:
        map_zeros_over(self._address_of(0), self.offset_of(self.parts))
        if self._copy is not None:
            move_pages(_address(self._copy), padded(self.part_bytes), self.address())

    def use_huge_pages(self) -> None:
        """Use huge pages for this rank's part where possible. Stop after about `HUGE_PAGES_SECONDS` seconds."""
        size = huge_page_bytes()
        if size:
            # Both ends are rounded up, so exactly one rank collapses each huge page.
            start, stop = (-(-self.offset_of(part) // size) * size for part in (self.mine, self.mine + 1))
            collapse(self, self.lead_bytes + start, self.lead_bytes + min(stop, self.offset_of(self.parts)), HUGE_PAGES_SECONDS)

    def view(self, part: int, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `numel` elements of a part, at least one, as a flat tensor. The tensor shares the memory."""
        return torch.frombuffer(self, dtype=dtype, count=numel, offset=self.lead_bytes + self.offset_of(part) + offset_bytes)

    def rows(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the `view` of every part, at the same offset in each part."""
        return [self.view(part, offset_bytes, numel, dtype) for part in range(self.parts)]

    def contents(self) -> memoryview:
        """Return all parts as one memoryview, which shares the memory."""
        return memoryview(self)[self.lead_bytes :][: self.offset_of(self.parts)]

    def offset_of(self, part: int) -> int:
        """Return the offset of a part, in bytes."""
        return part * padded(self.part_bytes)

    def address(self) -> int:
        """Return the address of this rank's part in this process."""
        return self._address_of(self.mine)

    def _address_of(self, part: int) -> int:
        return self.view(part, 0, 1, torch.uint8).data_ptr()


def _address(mapping: mmap.mmap) -> int:
    return torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()


def create_file(name: str, nbytes: int) -> int:
    """Make a new file in memory, and return its descriptor. The kernel frees the file when no process uses it any more.

    Raises:
        OSError: this system has no such files, or does not allow this size.
    """
    file = create_memory_file(name)
    try:
        os.ftruncate(file, nbytes)
    except BaseException:
        os.close(file)
        raise
    return file


def reserve(file: int, part_bytes: int, part: int) -> None:
    """Allocate the pages of a part now, so that a lack of memory is an error here, and not a bus error later.

    The caller must have checked `memory_limits`. Beyond the limit, the kernel kills the process without an error.

    Raises:
        OSError: the machine lacks memory, or the size of files is limited.
    """
    os.posix_fallocate(file, part * padded(part_bytes), padded(part_bytes))


def open_peer_fd(pid: int, file: int, name: str) -> int:
    """Open a file that another process of this machine made with `create_file`, and return a new descriptor.

    `file` is the descriptor in the process `pid`. `name` is the name that the other process passed to `create_file`.

    Raises:
        OSError: `file` is the descriptor of another file, or this process has no access to the other process.
    """
    path = f"/proc/{pid}/fd/{file}"
    # If the other process has another namespace of processes, `pid` may be the number of a third process here.
    if os.readlink(path) != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is not the memory that rank 0 of the node made; do the ranks live in different containers?")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


class FdServer:
    """Passes a file descriptor to other processes, over an abstract socket. Clients must be in the same network namespace.

    A client must send the token, which the ranks exchange by MPI. Call `serve` after all clients (at most `clients`) have
    connected and sent the token.

    Attributes:
        token: the bytes that clients must send.
    """

    def __init__(self, file: int, clients: int) -> None:
        self.address = f"\0syncline-{os.urandom(16).hex()}"
        self.token = os.urandom(_TOKEN_BYTES)
        self._file = file
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(self.address)
        self._listener.listen(clients)

    def serve(self) -> None:
        """Send the file to every client that has connected and sent the token. This method never waits."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                # Every client that has connected by now is served.
                return
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            if hmac.compare_digest(connection.recv(_TOKEN_BYTES), self.token):
                socket.send_fds(connection, [b"\0"], [self._file])
        except OSError:
            pass  # a stranger that sends nothing, or a client that has left

    def close(self) -> None:
        """Close the socket, so that no more clients can get the file."""
        self._listener.close()


def request_fd(address: str, token: bytes) -> socket.socket:
    """Connect to an `FdServer`, and send the token.

    Raises:
        OSError: the server cannot be reached, because it is on another machine or in another network namespace.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_REQUEST_TIMEOUT_S)
        connection.connect(address)
        connection.sendall(token)
    except BaseException:
        connection.close()
        raise
    return connection


def receive_fd(connection: socket.socket) -> int:
    """Receive the file's descriptor from an `FdServer`. Call this function after `FdServer.serve`.

    Raises:
        OSError: the server has sent no descriptor.
    """
    _, files, _, _ = socket.recv_fds(connection, 1, 1)
    if not files:
        raise OSError("rank 0 of the node handed over no file")
    os.set_inheritable(files[0], False)
    return files[0]
