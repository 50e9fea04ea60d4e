"""What Python's `os` and `mmap` do not offer everywhere, asked of the C library."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import sys

_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "ppc64le": 360, "s390x": 350}  # numbers of the system call
_CLOSE_ON_EXEC = 1
_MAP_FIXED = 0x10


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


@functools.cache
def _c() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    return library


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
