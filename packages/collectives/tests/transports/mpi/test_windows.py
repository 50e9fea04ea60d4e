"""Shared memory and who lies in it: two mappings of one file stand for two ranks."""

from __future__ import annotations

import gc
import os
import platform
import resource
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

from syncline.collectives.transports.mpi.node.memory import Windows
from syncline.collectives.transports.mpi.sync import NOWHERE
from syncline.collectives.transports.shared_memory.segment import Segment, create_file, padded, reserve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")

PAGE = padded(1)
SORTED = "syncline.collectives.transports.mpi.node.memory.sorted"  # what `add` calls in its middle


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


@pytest.mark.parametrize("part_bytes", [PAGE, 64 << 20])
def test_only_its_file_counts_as_memory_that_was_promised(part_bytes: int) -> None:
    """Two ranks of one file: what is mapped beside it is private, and no more than a huge page of each."""
    beside = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/zero" in line]
    kept = segments(2, part_bytes)
    assert [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/zero" in line] == beside
    assert all(len(segment) - segment.contents().nbytes <= 2 << 20 for segment in kept)


def test_it_is_in_no_file_system() -> None:
    before = set(os.listdir("/dev/shm"))
    segment, _ = segments(2, PAGE)
    names = {line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:test" in line}
    assert names == {"/memfd:test"}
    assert not any("test" in name for name in set(os.listdir("/dev/shm")) - before)
    del segment


def test_it_keeps_no_descriptor() -> None:
    """A process may have 1,024 descriptors, and a model more buckets than that."""
    before = os.listdir("/proc/self/fd")
    kept = [segments(2, PAGE) for _ in range(5)]
    assert os.listdir("/proc/self/fd") == before
    assert kept[4][0].view(0, 0, 1, torch.uint8).item() == 0


@pytest.mark.parametrize("part_bytes", [PAGE, 3 << 20])
def test_its_contents_are_a_buffer(part_bytes: int) -> None:
    mine, theirs = segments(2, part_bytes)
    assert (mine.offset_of(0), mine.offset_of(1)) == (0, part_bytes)
    assert mine.contents().nbytes == 2 * part_bytes
    numbers = mine.contents().cast("q")
    numbers[mine.offset_of(1) // 8 + 2] = 77
    numbers[-1] = 78
    assert theirs.view(1, 16, 1, torch.int64).item() == 77
    assert theirs.view(1, part_bytes - 8, 1, torch.int64).item() == 78


def test_what_is_unmapped_is_all_that_was_mapped() -> None:
    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:test" in line]

    gc.collect()
    before = len(mapped())
    pair = segments(2, 3 * PAGE)
    tensor = pair[0].view(0, 0, 1, torch.uint8)
    assert len(mapped()) == before + 2
    del pair
    gc.collect()
    assert len(mapped()) == before + 1
    del tensor
    gc.collect()
    assert len(mapped()) == before


def test_a_python_without_memfd_create(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that was built on an old C library, to run everywhere."""
    monkeypatch.delattr(os, "memfd_create")
    file = create_file("test-old", PAGE)
    assert os.readlink(f"/proc/self/fd/{file}") == "/memfd:test-old (deleted)"
    assert not os.get_inheritable(file)
    assert os.fstat(file).st_size == PAGE
    os.close(file)
    with pytest.raises(OSError, match="Invalid argument"):
        create_file("x" * 300, PAGE)
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    with pytest.raises(OSError, match="on pdp11 has no memory that processes share"):
        create_file("test-old", PAGE)


def test_a_file_that_cannot_be_mapped() -> None:
    read_only = os.open("/proc/self/exe", os.O_RDONLY)
    try:
        with pytest.raises(PermissionError):
            Segment(read_only, 1, PAGE, 0)
    finally:
        os.close(read_only)


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
    keys = [windows.key_of(tensor) for tensor in (whole, whole[1:], other, other[7:9])]
    assert len({NOWHERE, *keys}) == 5
    assert [windows.place(key) for key in keys] == [(first, 0), (first, 4), (second, 0), (second, 14)]


def test_tensors_elsewhere_or_partly_elsewhere_are_not_found() -> None:
    windows, (first, _) = Windows(), segments(2, 100)
    assert windows.key_of(torch.zeros(3)) == NOWHERE
    windows.add(first)
    assert windows.key_of(torch.zeros(3)) == NOWHERE
    assert windows.key_of(first.view(0, 96, 1, torch.float32)) != NOWHERE
    assert windows.key_of(first.view(0, 96, 2, torch.float32)) == NOWHERE  # ends in the padding
    assert windows.key_of(first.view(1, 0, 1, torch.float32)) == NOWHERE  # another rank's part


def test_a_place_in_a_segment_that_has_gone_is_no_place() -> None:
    windows, (gone,), (first,) = Windows(), segments(1, 100), segments(1, 100)
    windows.add(gone)
    windows.add(first)
    key, last = key_of(windows, gone), key_of(windows, first, 99)
    del gone
    gc.collect()
    with pytest.raises(LookupError, match=f"no segment has place {key}"):
        windows.place(key)
    assert windows.place(last) == (first, 99)


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


def key_of(windows: Windows, segment: Segment, offset_bytes: int = 0) -> int:
    key = windows.key_of(segment.view(segment.mine, offset_bytes, 1, torch.uint8))
    assert key != NOWHERE
    return key


def test_keys_are_of_one_place_for_ever() -> None:
    """Another rank may still have its tensor in the first."""
    windows, alone = Windows(), Windows()
    (first,), (second,), (third,) = segments(1, 100), segments(1, 1), segments(1, 100)
    for segment in (first, second, third):
        windows.add(segment)
    keys = [key_of(windows, first, offset) for offset in range(100)]
    keys += [key_of(windows, second), *(key_of(windows, third, offset) for offset in range(100))]
    assert len(set(keys)) == 201
    del first, second
    gc.collect()
    assert key_of(windows, third, 3) == keys[-97]
    alone.add(third)
    assert key_of(alone, third) != key_of(windows, third)


def test_keys_last_for_programs_that_allocate_in_every_step() -> None:
    windows = Windows()
    (segment,) = segments(1, 100)
    windows._next_key = 2**20 * 2**40  # a million allocations of a TiB
    windows.add(segment)
    assert 0 <= key_of(windows, segment, 99) < 2**63


def test_one_goes_while_another_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another thread, in the middle of `add`: neither undoes what the other does."""
    windows, (leaving,), (coming,) = Windows(), segments(1, 1), segments(1, 1)
    windows.add(leaving)
    gone = threading.Thread(target=lambda kept: kept.clear(), args=([leaving],))
    del leaving

    def interrupted(entries: Iterable[Any], key: Callable[[Any], int]) -> list[Any]:
        found = sorted(entries, key=key)
        gone.start()
        gone.join(0.1)  # it has to wait until `add` is done
        return found

    monkeypatch.setattr(SORTED, interrupted, raising=False)
    windows.add(coming)
    gone.join()
    assert len(windows) == 1
    assert key_of(windows, coming) == 2


def test_one_goes_in_the_middle_of_add_on_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the garbage is collected there: `add` does not wait for itself."""
    windows, kept, (coming,) = Windows(), segments(1, 1), segments(1, 1)
    windows.add(kept[0])
    monkeypatch.setattr(SORTED, lambda entries, key: kept.clear() or sorted(entries, key=key), raising=False)
    windows.add(coming)
    assert key_of(windows, coming) == 2
