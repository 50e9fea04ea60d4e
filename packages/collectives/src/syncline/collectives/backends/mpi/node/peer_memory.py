"""Reading the memory of other processes of this machine: Linux's cross-memory attach."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

import torch

from ....errors import TransportError
from .board import NOWHERE

_TOKEN_BYTES = 16
_ALIGNMENT_BYTES = 64

# Room for what is read, of all processes together, unless somebody needs more.
_LANDING_BYTES = (1 << 20) + (4 << 10)

# Whether this torch was built for a device at all; to ask a tensor takes longer.
_MAY_BE_PINNED = torch.accelerator.current_accelerator() is not None


def readable_address(tensor: torch.Tensor) -> int:
    """Where other processes may read a tensor; `NOWHERE` if it is pinned for a device: that may lie where they cannot."""
    return NOWHERE if _MAY_BE_PINNED and tensor.is_pinned() else tensor.data_ptr()


class _Span(ctypes.Structure):
    """The system's `struct iovec`."""

    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class PeerMemory:
    """The memory of some processes, each of which may look into the others'.

    A copy from another process costs a system call, and no copy into memory that is shared. Systems may refuse it: to
    processes of different users or containers, or by a setting (`kernel.yama.ptrace_scope`). `Introduction` finds out.

    Args:
        pids: of the processes, by rank.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._to, self._from = _Span(), _Span()
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        spans = ctypes.c_void_p, ctypes.c_ulong
        self._read.argtypes = [ctypes.c_int, *spans, *spans, ctypes.c_ulong]
        self._landing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._spans = ctypes.addressof(self._to), 1, ctypes.addressof(self._from), 1, 0

    def __len__(self) -> int:
        return len(self._pids)

    def landing(self, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """For each process room for what is read next; the same at every call, so that it stays in the core's cache."""
        nbytes = numel * dtype.itemsize
        step = -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._landing.numel() < step * len(self._pids):
            room_bytes = max(_LANDING_BYTES, step * len(self._pids))
            with torch.inference_mode(False):  # it serves calls outside that mode, too
                self._landing = torch.empty(room_bytes, dtype=torch.uint8, device="cpu")
        return [self._landing[start : start + nbytes].view(dtype) for start in range(0, step * len(self._pids), step)]

    def read(self, rank: int, address: int, here: int, nbytes: int) -> None:
        """Copy what lies at an address of a rank to one of this process.

        Raises:
            TransportError: the process is gone, or refuses.
        """
        while nbytes:
            self._to.start, self._from.start = here, address
            self._to.nbytes = self._from.nbytes = nbytes
            moved = self._read(self._pids[rank], *self._spans)
            if moved <= 0:
                reason = os.strerror(ctypes.get_errno()) if moved else "it gives nothing"
                raise TransportError(
                    f"cannot read the memory of rank {rank} of this node (process {self._pids[rank]}): {reason}; did it end?"
                )
            here, address, nbytes = here + moved, address + moved, nbytes - moved


class Introduction:
    """What a process tells the others, so that they can try whether they can read its memory.

    Attributes:
        words: four integers of 64 bits: who, where, and a random token that lies there.
    """

    def __init__(self) -> None:
        self._token = torch.frombuffer(bytearray(os.urandom(_TOKEN_BYTES)), dtype=torch.int64)
        self.words = [os.getpid(), self._token.data_ptr(), *self._token.tolist()]

    def answered(self, words: Sequence[Sequence[int]], mine: int) -> PeerMemory | None:
        """The memory of all, if this process can read what each says; they must not forget their tokens meanwhile."""
        if sys.platform != "linux":
            return None
        try:
            peers = PeerMemory([pid for pid, *_ in words])
            for rank, (_, address, *token) in enumerate(words):
                if rank != mine:
                    seen = torch.zeros_like(self._token)
                    peers.read(rank, address, seen.data_ptr(), seen.nbytes)
                    if seen.tolist() != token:  # another process has that number here: pid namespaces
                        return None
        except (TransportError, AttributeError):  # refused, or a C library without it
            return None
        return peers
