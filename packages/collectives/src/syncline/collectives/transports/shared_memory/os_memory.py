"""System functions that Python lacks on some systems: files in memory, mappings, huge pages, and the memory fence."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MADV_COLLAPSE = 25  # since Linux 6.1; Python's mmap names it since 3.15
_LARGEST_USEFUL = 16 << 20  # larger pages are larger than most tensors (aarch64 has huge pages of 512 MiB)

_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "ppc64le": 360, "s390x": 350}  # numbers of the system call
_CLOSE_ON_EXEC = 1
_MAP_FIXED = 0x10
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2

_SEQUENTIALLY_CONSISTENT = 5  # C's memory_order_seq_cst

Fence: TypeAlias = Callable[[], object]
"""A call makes sure that all processors see the thread's earlier reads and writes of memory before its later ones."""


def no_fence() -> None:
    """Do nothing, because x86 needs no fence: see Note [Order in memory] in `mpi.node.shared_sync`."""


def find_fence(machine: str | None = None) -> Fence | None:
    """Return a full memory fence for the processor type `machine` (by default, this processor); None if none is installed.

    A call of the fence takes about 0.4 us; on x86 it takes less.
    """
    if (machine or platform.machine()).lower() in ("x86_64", "amd64"):
        return no_fence
    # Python has no fence. GCC's libatomic has one for every processor, and most systems have libatomic.
    try:
        library = ctypes.PyDLL("libatomic.so.1")
    except OSError:
        return None
    return partial(library.atomic_thread_fence, _SEQUENTIALLY_CONSISTENT)


@functools.cache
def huge_page_bytes() -> int:
    """Return the size of a huge page of this system; 0 if the system has no huge pages of a useful size."""
    try:
        nbytes = int(_SIZE.read_text())
    except (OSError, ValueError):
        # This kernel has no transparent huge pages.
        return 0
    return nbytes if mmap.PAGESIZE < nbytes <= _LARGEST_USEFUL else 0


def collapse(mapping: mmap.mmap, start: int, stop: int, seconds: float) -> int:
    """Make the kernel replace small pages by huge pages with the same content. Return the number of bytes in huge pages.

    The memory may be in use. If several processes share the memory, one call is enough. With kernels before 6.1, this function
    does nothing. Measured cost: 1 to 4 ms for each huge page of 2 MiB.

    Args:
        mapping: the mapped memory.
        start: the offset in `mapping` of the first byte. The address of this byte must be a multiple of the size of a huge
            page.
        stop: the offset in `mapping` of the end. If the last huge page would be incomplete, its small pages stay.
        seconds: the time limit. After this time, no more pages are replaced.
    """
    step = huge_page_bytes()
    end_s = time.monotonic() + seconds
    done = 0
    while step and start + step <= stop and time.monotonic() < end_s:
        try:
            mapping.madvise(_MADV_COLLAPSE, start, step)
            done += step
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EBUSY, errno.ENOMEM):  # these concern only this page
                break
        start += step
    return done


def create_memory_file(name: str) -> int:
    """Make a new file in memory, outside of any file system (a memfd), and return the file's descriptor.

    Raises:
        OSError: this system has no such files.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    # Some builds of Python lack `os.memfd_create`, because their C library is older than glibc 2.27.
    if sys.platform != "linux" or platform.machine() not in _MEMFD_CREATE:
        raise OSError(
            errno.ENOSYS, f"{sys.platform} on {platform.machine()} has no memory that processes share by a descriptor"
        )
    number = ctypes.c_long(_MEMFD_CREATE[platform.machine()])
    return _checked(_c().syscall(number, name.encode(), ctypes.c_uint(_CLOSE_ON_EXEC)))


def map_over(address: int, nbytes: int, file: int) -> None:
    """Replace mapped pages at `address` by a shared mapping of the first `nbytes` bytes of a file.

    Raises:
        OSError: the system refuses.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    found = _c().mmap(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, file, 0)
    _checked(-1 if found != address else 0)


def map_zeros_over(address: int, nbytes: int) -> None:
    """Replace mapped pages at `address` by private pages that contain zeros.

    Raises:
        OSError: the system refuses.
    """
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    found = _c().mmap(address, nbytes, protection, flags, -1, 0)
    _checked(-1 if found != address else 0)


def move_pages(source: int, nbytes: int, target: int) -> None:
    """Move private pages from `source` to `target`, and replace the pages there. At `source`, pages with zeros remain.

    Raises:
        OSError: the system refuses.
    """
    found = _c().mremap(source, nbytes, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, target)
    _checked(-1 if found != target else 0)
    map_zeros_over(source, nbytes)  # the owner of this address unmaps it later, so something must be mapped there


def update(target: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` bytes, but only if source and target differ.

    The comparison takes half the time of a copy, and allocates no pages.
    """
    if _c().memcmp(target, source, nbytes):
        ctypes.memmove(target, source, nbytes)


@functools.cache
def _c() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    library.mremap.restype = ctypes.c_void_p
    library.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    library.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return library


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
