"""Huge pages: what is in them stays what it was, and nothing goes wrong where there are none."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from syncline.collectives.transports.shared_memory import os_memory, segment
from syncline.collectives.transports.shared_memory.os_memory import collapse, huge_page_bytes
from syncline.collectives.transports.shared_memory.segment import Segment, create_file, padded, reserve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="huge pages as Linux has them")

SIZE = huge_page_bytes() or 2 << 20
PART = 2 * SIZE + SIZE // 2  # five halves: one huge page belongs to two ranks
needs_huge_pages = pytest.mark.skipif(not huge_page_bytes(), reason="this system has no huge pages for tensors")


class Refusing(mmap.mmap):
    """Memory that cannot be had in huge pages: what `madvise` raises, call by call; 0 is success."""

    errors: Iterator[int]
    starts: list[int]

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        assert (option, length) == (25, SIZE)
        self.starts.append(start)
        if number := next(self.errors):
            raise OSError(number, os.strerror(number))


def refusing(*errors: int) -> Refusing:
    memory = Refusing(-1, 4 * SIZE)
    memory.errors, memory.starts = iter(errors), []
    return memory


def in_huge_pages(name: str) -> int:
    """How many bytes of a file this process has mapped in huge pages."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            counts = f"memfd:{name}" in line
        elif counts and line.startswith("ShmemPmdMapped"):
            found += int(line.split()[1]) << 10
    return found


@pytest.fixture
def _pages_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os_memory, "huge_page_bytes", lambda: SIZE)


@needs_huge_pages
def test_both_ranks_get_them_for_what_both_wrote() -> None:
    name = "huge-test"
    file = create_file(name, 2 * padded(PART))
    try:
        ranks = [Segment(file, 2, PART, rank) for rank in range(2)]
        for rank in range(2):
            reserve(file, PART, rank)
    finally:
        os.close(file)
    for rank, memory in enumerate(ranks):
        memory.view(rank, 0, PART, torch.uint8).copy_(torch.arange(PART) % 251 + rank)
    for memory in ranks:
        assert memory.view(0, 0, 1, torch.uint8).data_ptr() % SIZE == 0
        memory.use_huge_pages()
    expected = torch.cat([torch.arange(PART) % 251 + rank for rank in range(2)]).to(torch.uint8)
    everything = [torch.cat([memory.view(part, 0, PART, torch.uint8) for part in range(2)]) for memory in ranks]
    assert all(torch.equal(seen, expected) for seen in everything)
    ranks[1].view(0, SIZE, 1, torch.uint8).fill_(255)
    assert ranks[0].view(0, SIZE, 1, torch.uint8).item() == 255
    if collapse(ranks[0], ranks[0].lead_bytes, ranks[0].lead_bytes + SIZE, 60) == 0:
        pytest.skip("this kernel makes no huge pages of shared memory")
    assert in_huge_pages(name) >= 2 * SIZE  # the two mappings count each; under a lack of memory not all are had


@needs_huge_pages
def test_small_memory_has_no_lead() -> None:
    file = create_file("test", padded(SIZE - 1))
    try:
        assert Segment(file, 1, SIZE - mmap.PAGESIZE, 0).lead_bytes == 0
        assert len(Segment(file, 1, SIZE - mmap.PAGESIZE, 0)) == SIZE - mmap.PAGESIZE
    finally:
        os.close(file)


@pytest.mark.usefixtures("_pages_everywhere")
def test_a_page_that_cannot_be_had_is_left_out() -> None:
    memory = refusing(0, errno.EAGAIN, errno.ENOMEM, 0)
    assert collapse(memory, 0, 4 * SIZE, 60) == 2 * SIZE
    assert memory.starts == [0, SIZE, 2 * SIZE, 3 * SIZE]


@pytest.mark.usefixtures("_pages_everywhere")
def test_a_kernel_that_cannot_is_asked_once() -> None:
    memory = refusing(errno.EINVAL)
    assert collapse(memory, 0, 4 * SIZE, 60) == 0
    assert memory.starts == [0]


@pytest.mark.usefixtures("_pages_everywhere")
def test_only_whole_huge_pages_and_only_in_time() -> None:
    memory = refusing(0, 0)
    assert collapse(memory, SIZE, 4 * SIZE - 1, 60) == 2 * SIZE
    assert memory.starts == [SIZE, 2 * SIZE]
    assert collapse(memory, 0, 4 * SIZE, 0) == 0


@pytest.mark.parametrize("text", ["", "none", "4096", str(512 << 20), None])
def test_systems_without(text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "hpage_pmd_size"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(os_memory, "_SIZE", file)
    assert huge_page_bytes.__wrapped__() == 0
    memory = refusing()
    monkeypatch.setattr(os_memory, "huge_page_bytes", lambda: 0)
    assert collapse(memory, 0, 4 * SIZE, 60) == 0


def test_a_segment_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "huge_page_bytes", lambda: 0)
    file = create_file("test", 2 * padded(PART))
    try:
        memory = Segment(file, 2, PART, 1)
    finally:
        os.close(file)
    memory.use_huge_pages()
    assert len(memory) == memory.contents().nbytes == 2 * padded(PART)
    memory.view(1, 0, 1, torch.uint8).fill_(7)
    assert memory.contents()[memory.offset_of(1)] == 7
