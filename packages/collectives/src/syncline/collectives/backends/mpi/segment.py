"""Memory that the ranks of a node share."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

import torch

# Python before 3.13 keeps a descriptor of its own open for each mapping.
_WITHOUT_DESCRIPTOR: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def padded(nbytes: int) -> int:
    """Rounded up to whole pages, so that no page (and no cache line) belongs to two ranks."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Segment(mmap.mmap):
    """A part for each rank of a node, one after the other, each on pages of its own, mapped into this process.

    ::

        part of rank 0       | part of rank 1       | part of rank 2       |
        ^ offset 0             ^ offset 0             ^ offset 0

    The mapping lasts as long as this object, and each tensor made by `view` refers to it: the memory can neither vanish under
    a tensor nor outlive the last one on all ranks. Nobody calls `close`.

    Args:
        file: a descriptor of a file of `parts` padded parts; may be closed afterwards.
        parts: how many.
        part_bytes: the size of each.
        mine: this rank's part.
    """

    mine: int
    parts: int
    part_bytes: int

    def __new__(cls, file: int, parts: int, part_bytes: int, mine: int) -> Segment:  # noqa: D102 - the class says it
        segment = super().__new__(cls, file, parts * padded(part_bytes), **_WITHOUT_DESCRIPTOR)
        segment.parts = parts
        segment.part_bytes = part_bytes
        segment.mine = mine
        return segment

    def view(self, part: int, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements of a part as a flat tensor, which shares the memory; one or more."""
        return torch.frombuffer(self, dtype=dtype, count=numel, offset=self.offset_of(part) + offset_bytes)

    def offset_of(self, part: int) -> int:
        """Where a part begins, in bytes."""
        return part * padded(self.part_bytes)

    def address(self) -> int:
        """Where this rank's part begins in this process."""
        return self.view(self.mine, 0, 1, torch.uint8).data_ptr()


def create_file(name: str, nbytes: int) -> int:
    """A descriptor of a new file in memory that has no place in any file system: when its users are gone, so is it.

    It is not in /dev/shm, so it needs no room there, and nothing is left of it after a crash.

    Raises:
        OSError: this system has no such files, or does not allow one of that size.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    file = os.memfd_create(name)
    try:
        os.ftruncate(file, nbytes)
    except OSError:
        os.close(file)
        raise
    return file


def open_file(pid: int, file: int, name: str) -> int:
    """A descriptor of the file that another process of this machine made by `create_file`.

    Raises:
        OSError: the process cannot be looked into (another user, another container), or the file is another.
    """
    path = f"/proc/{pid}/fd/{file}"
    if os.readlink(path) != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is not the memory that rank 0 of the node made; do the ranks live in different containers?")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def reserve(file: int, part_bytes: int, part: int) -> None:
    """Let the pages of a part exist, so that a lack of memory is an error now and not a bus error later.

    Raises:
        OSError: there is no memory left.
    """
    os.posix_fallocate(file, part * padded(part_bytes), padded(part_bytes))
