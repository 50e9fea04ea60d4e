"""What the system is asked for and Python does not offer everywhere: memory files, mapping them, huge pages."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import sys
import time
from pathlib import Path

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MADV_COLLAPSE = 25  # since Linux 6.1; Python's mmap names it since 3.15
_LARGEST_USEFUL = 16 << 20  # larger ones (aarch64 has some of 512 MiB) would be none of most tensors

_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "ppc64le": 360, "s390x": 350}  # numbers of the system call
_CLOSE_ON_EXEC = 1
_MAP_FIXED = 0x10
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


@functools.cache
def huge_page_bytes() -> int:
    """The size of a huge page of this system; 0 where it has none that suits tensors."""
    try:
        nbytes = int(_SIZE.read_text())
    except (OSError, ValueError):
        return 0
    return nbytes if mmap.PAGESIZE < nbytes <= _LARGEST_USEFUL else 0


def collapse(mapping: mmap.mmap, start: int, stop: int, seconds: float) -> int:
    """Let the kernel put huge pages in the place of usual ones, with what they hold, as far as it can and in the time given.

    It may be done at any time, whoever uses the memory, and for all processes that share it one does it. Kernels before 6.1
    cannot; others do it whatever is configured for shared memory, unless that is `deny`. Nothing but speed depends on it.
    Costs 1 to 4 ms for each page of 2 MiB, measured.

    Args:
        mapping: of memory.
        start: where in it, in bytes, at an address that is a multiple of the size of a huge page.
        stop: where it ends, in bytes; what is left of a whole huge page stays as it is.
        seconds: after which the rest stays as it is.

    Returns:
        How many bytes lie in huge pages now.
    """
    step = huge_page_bytes()
    deadline = time.monotonic() + seconds
    done = 0
    while step and start + step <= stop and time.monotonic() < deadline:
        try:
            mapping.madvise(_MADV_COLLAPSE, start, step)
            done += step
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EBUSY, errno.ENOMEM):  # those are of this page alone
                break
        start += step
    return done


def create_memory_file(name: str) -> int:
    """A descriptor of a new file that has no place in any file system.

    Python has this function only where it was built on a C library that did (glibc 2.27); kernels do since 3.17.

    Raises:
        OSError: this system has no such files.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    if sys.platform != "linux" or platform.machine() not in _MEMFD_CREATE:
        raise OSError(
            errno.ENOSYS, f"{sys.platform} on {platform.machine()} has no memory that processes share by a descriptor"
        )
    number = ctypes.c_long(_MEMFD_CREATE[platform.machine()])
    return _checked(_c().syscall(number, name.encode(), ctypes.c_uint(_CLOSE_ON_EXEC)))


def map_over(address: int, nbytes: int, file: int) -> None:
    """Let the pages at an address of this process, which are mapped already, be the beginning of a file, shared.

    Raises:
        OSError: the system refuses.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    found = _c().mmap(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, file, 0)
    _checked(-1 if found != address else 0)


def map_zeros_over(address: int, nbytes: int) -> None:
    """Let the pages at an address of this process, which are mapped already, be private ones that hold zeros.

    Raises:
        OSError: the system refuses.
    """
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    found = _c().mmap(address, nbytes, protection, flags, -1, 0)
    _checked(-1 if found != address else 0)


def move_pages(source: int, nbytes: int, target: int) -> None:
    """Let private pages of this process be at another address, where something is mapped; zeros take their place.

    Raises:
        OSError: the system refuses.
    """
    found = _c().mremap(source, nbytes, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, target)
    _checked(-1 if found != target else 0)
    map_zeros_over(source, nbytes)  # whoever holds that address unmaps it in the end


def update(target: int, source: int, nbytes: int) -> None:
    """Copy memory if it is not the same. To compare touches no page that was never written, and takes half the time."""
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
