"""Memory that the ranks of a node share."""

from __future__ import annotations

import mmap
import os

import torch
from typing_extensions import override

from ...forks import Inherited, tell_in_forks
from .os_memory import collapse, create_memory_file, huge_page_bytes, map_over, map_zeros_over, move_pages, update

# For how long an allocation may wait for huge pages.
HUGE_PAGES_SECONDS = 1.0


def padded(nbytes: int) -> int:
    """Rounded up to whole pages, so that no page (and no cache line) belongs to two ranks."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Segment(mmap.mmap, Inherited):
    """A part for each rank of a node, one after the other, each on pages of its own, mapped into this process.

    ::

        part of rank 0       | part of rank 1       | part of rank 2       |
        ^ offset 0             ^ offset 0             ^ offset 0

    The mapping lasts as long as this object, and each tensor made by `view` refers to it: the memory can neither vanish under
    a tensor nor outlive the last one on all ranks. Nobody calls `close`.

    It needs no descriptor. Python's mmap would keep one of its own open for each file, so it maps no file at first, only
    memory, and the file then takes the place of that memory. Python unmaps an address in the end, whatever is there.

    If a huge page fits into it, it lies where huge pages can: some memory before and behind it is then mapped, and never used.

    Note [Segments in a fork]
    ~~~~~~~~~~~~~~~~~~~~~~~~~
    A fork inherits the mapping as it is: what it writes, its parent and the other ranks would read. So in a fork the pages are
    private ones at the same address, and hold zeros. The exception is this rank's part if the user's tensors lie there
    (`holds_tensors`): these are what they were at the fork. The kernel copies no shared pages on write. So the parent keeps a
    copy in private memory, which it brings up to date before it forks, and whose pages become those of the fork.

    Cost: a fork takes as long as to compare the part with the copy, and to copy it if it has changed (a DataLoader makes its
    workers one after the other: nothing changes in between). The copy needs as much memory as the part, once for the parent
    and all of its forks, until one of them writes.

    Attributes:
        lead_bytes: how much is mapped before the first part.
        holds_tensors: whether this rank's part holds tensors of the user.

    Args:
        file: a descriptor of a file of `parts` padded parts; may be closed afterwards.
        parts: how many.
        part_bytes: the size of each.
        mine: this rank's part.
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
        # Private: what is left of it before and behind then counts alone as memory that was promised.
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
            if self._copy is None:
                self._copy = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            update(_address(self._copy), self.address(), size)

    @override
    def in_fork(self) -> None:
        map_zeros_over(self._address_of(0), self.offset_of(self.parts))
        if self._copy is not None:
            move_pages(_address(self._copy), padded(self.part_bytes), self.address())

    def use_huge_pages(self) -> None:
        """Let this rank's part lie in huge pages for all ranks, as far as can be. Waits `HUGE_PAGES_SECONDS` at most."""
        size = huge_page_bytes()
        if size:
            start, stop = (-(-self.offset_of(part) // size) * size for part in (self.mine, self.mine + 1))
            collapse(self, self.lead_bytes + start, self.lead_bytes + min(stop, self.offset_of(self.parts)), HUGE_PAGES_SECONDS)

    def view(self, part: int, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements of a part as a flat tensor, which shares the memory; one or more."""
        return torch.frombuffer(self, dtype=dtype, count=numel, offset=self.lead_bytes + self.offset_of(part) + offset_bytes)

    def rows(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The same place of every part, as `view` shows it."""
        return [self.view(part, offset_bytes, numel, dtype) for part in range(self.parts)]

    def contents(self) -> memoryview:
        """All parts as bytes, which share the memory."""
        return memoryview(self)[self.lead_bytes :][: self.offset_of(self.parts)]

    def offset_of(self, part: int) -> int:
        """Where a part begins, in bytes."""
        return part * padded(self.part_bytes)

    def address(self) -> int:
        """Where this rank's part begins in this process."""
        return self._address_of(self.mine)

    def _address_of(self, part: int) -> int:
        return self.view(part, 0, 1, torch.uint8).data_ptr()


def _address(mapping: mmap.mmap) -> int:
    return torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()


def create_file(name: str, nbytes: int) -> int:
    """A descriptor of a new file in memory that has no place in any file system: when its users are gone, so is it.

    It is not in /dev/shm, so it needs no room there, and nothing is left of it after a crash.

    Raises:
        OSError: this system has no such files, or does not allow one of that size.
    """
    file = create_memory_file(name)
    try:
        os.ftruncate(file, nbytes)
    except BaseException:
        os.close(file)
        raise
    return file


def reserve(file: int, part_bytes: int, part: int) -> None:
    """Let the pages of a part exist, so that a lack of memory is an error now and not a bus error later.

    An error, that is, of the machine or of a limit on the size of files. Beyond the limit of a control group the kernel ends a
    process instead: ask `memory_limit` before.

    Raises:
        OSError: there is no memory left.
    """
    os.posix_fallocate(file, part * padded(part_bytes), padded(part_bytes))
