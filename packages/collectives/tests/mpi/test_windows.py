"""Shared memory and who lies in it: two mappings of one file stand for two ranks."""

from __future__ import annotations

import gc
import os
import resource
import sys
from pathlib import Path

import pytest
import torch

from syncline.collectives.backends.mpi.segment import Segment, create_file, open_file, padded, reserve
from syncline.collectives.backends.mpi.windows import Windows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")

PAGE = padded(1)


def segments(size: int, part_bytes: int) -> list[Segment]:
    file = create_file("test", size * padded(part_bytes))
    try:
        return [Segment(file, size, part_bytes, rank) for rank in range(size)]
    finally:
        os.close(file)


def test_what_one_rank_writes_another_reads() -> None:
    mine, theirs = segments(2, PAGE + 4)
    assert padded(PAGE + 4) == 2 * PAGE
    mine.view(0, 8, 3, torch.float32).copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert theirs.view(0, 8, 3, torch.float32).tolist() == [1.0, 2.0, 3.0]
    assert theirs.view(1, 8, 3, torch.float32).tolist() == [0.0, 0.0, 0.0]
    assert theirs.address() == theirs.view(1, 0, 1, torch.int8).data_ptr()


def test_the_file_of_another_process_is_known_by_its_name() -> None:
    file = create_file("test-name", PAGE)
    other = open_file(os.getpid(), file, "test-name")
    assert os.path.sameopenfile(file, other)
    with pytest.raises(OSError, match="is not the memory that rank 0 of the node made"):
        open_file(os.getpid(), file, "another-name")
    os.close(other)
    os.close(file)
    with pytest.raises(OSError, match="No such file"):
        open_file(os.getpid(), file, "test-name")


def test_it_is_in_no_file_system() -> None:
    before = set(os.listdir("/dev/shm"))
    segment, _ = segments(2, PAGE)
    names = {line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:test" in line}
    assert names == {"/memfd:test"}
    assert not any("test" in name for name in set(os.listdir("/dev/shm")) - before)
    del segment


def test_a_lack_of_memory_is_an_error_at_once() -> None:
    """The limit of a file's size stands for that of memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = create_file("test", PAGE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * PAGE, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            create_file("test", 4 * PAGE)
        with pytest.raises(OSError, match="File too large"):
            reserve(file, 2 * PAGE, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        os.close(file)


def test_tensors_are_found_where_they_lie() -> None:
    windows, (first, _), (_, second) = Windows(), segments(2, 100), segments(2, 40)
    windows.add(first)
    windows.add(second)
    whole, other = first.view(0, 0, 25, torch.float32), second.view(1, 0, 20, torch.float16)
    place, of_other = windows.find(whole), windows.find(other[7:9])
    assert place is not None
    assert of_other is not None
    assert (place.segment, place.offset_bytes) == (first, 0)
    assert (of_other.segment, of_other.offset_bytes) == (second, 14)
    keys = {found.key for found in map(windows.find, [whole, whole[1:], other, other[1:]]) if found is not None}
    assert len(keys) == 4


def test_tensors_elsewhere_or_partly_elsewhere_are_not_found() -> None:
    windows, (first, _) = Windows(), segments(2, 100)
    assert windows.find(torch.zeros(3)) is None
    windows.add(first)
    assert windows.find(torch.zeros(3)) is None
    assert windows.find(first.view(0, 96, 1, torch.float32)) is not None
    assert windows.find(first.view(0, 96, 2, torch.float32)) is None  # ends in the padding
    assert windows.find(first.view(1, 0, 1, torch.float32)) is None  # another rank's part


def test_memory_lasts_as_long_as_tensors_and_no_longer() -> None:
    windows, pair = Windows(), segments(2, 100)
    windows.add(pair[0])
    tensor = pair[0].view(0, 0, 25, torch.float32)
    del pair
    gc.collect()
    tail = tensor[20:]
    del tensor
    assert tail.fill_(7.0).tolist() == [7.0] * 5
    assert len(windows) == 1
    del tail
    gc.collect()
    assert len(windows) == 0


def test_numbers_go_on_when_segments_go() -> None:
    """Another rank may still have its tensor in the first."""
    windows = Windows()
    first, second = segments(1, 100) + segments(1, 100)
    windows.add(first)
    del first
    gc.collect()
    windows.add(second)
    found, alone = windows.find(second.view(0, 0, 1, torch.int8)), Windows()
    alone.add(second)
    other = alone.find(second.view(0, 0, 1, torch.int8))
    assert found is not None
    assert other is not None
    assert found.key != other.key
