"""The peak memory of a contender, as the operating system counts it, on Linux with glibc.

The peak is that of this process's resident memory, minus its memory before. A page that several processes share counts for each
of them in part, as in the proportional set size.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

from .timing import Step

STEPS = 3
_M_MMAP_THRESHOLD = -3  # mallopt(3)
_SELF = Path("/proc/self")


def can_be_measured() -> bool:
    """Whether the peak can be reset, and freed memory can be given back."""
    return (_SELF / "clear_refs").exists() and hasattr(ctypes.CDLL(None), "malloc_trim")


def peak_bytes(make: Callable[[], Step]) -> int:
    """Make a contender and let it take some steps; returns by how much memory grew at most. A collective, if `make` is."""
    _give_back_what_is_free()
    (_SELF / "clear_refs").write_text("5")  # resets the peak (proc_pid_clear_refs(5))
    before = _kib("status", "VmRSS") - _counted_twice_kib()
    step = make()
    for _ in range(STEPS):
        step()
    return 1024 * (_kib("status", "VmHWM") - _counted_twice_kib() - before)


def _give_back_what_is_free() -> None:
    """Give freed memory back. Also let malloc map every large block separately, so that the next contender cannot reuse it."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    libc.malloc_trim(0)


def _counted_twice_kib() -> int:
    """By how much the resident size is larger than this process's part of shared memory."""
    return _kib("status", "RssShmem") - _kib("smaps_rollup", "Pss_Shmem")


def _kib(file: str, name: str) -> int:
    return kib_in((_SELF / file).read_text(), name)


def kib_in(text: str, name: str) -> int:
    """The number in a line such as "name:   12 kB". A pure function."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"no {name} in {text!r}")
    return int(found[1])
