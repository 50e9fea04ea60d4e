"""The real `cupy.cuda.nccl` over `FakeNccl`, on the CPU's memory: a library of C named libnccl.so.2 stands between them.

`run_processes` runs it as one process. This process builds the library in its folder, and runs every check of the conformance
suite on 2 and 3 ranks that are threads. It needs its own process, because CuPy takes the first loaded library with this name.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.collectives.testing import CHECKS
from test_support.fake_nccl import FakeCommunicator, FakeNccl, NcclError
from test_support.fake_nccl_group import run_on_fakes

NOT_OVER_NCCL = (
    "point_to_point_tags",
    "point_to_point_any_source",
    "point_to_point_futures",
    "point_to_point_apart_from_other_calls",
)
_INTERNAL_ERROR, _INVALID = 3, 4
# Each function passes its name and its arguments, by value or by address, to Python, and returns the result.
SOURCE = r"""
#include <stddef.h>
#include <stdint.h>

typedef struct { char bytes[128]; } unique_id;
typedef intptr_t word;

static int (*serve)(const char *, word *);

void fake_nccl_serve(int (*function)(const char *, word *)) { serve = function; }

#define HAND(name, ...) { word arguments[] = {__VA_ARGS__}; return serve(name, arguments); }
#define W (word)

const char *ncclGetErrorString(int status) {
    return status == 6 ? "remote process exited or there was a network error" : "an error of the fake";
}
int ncclGetVersion(int *version) HAND("version", W version)
int ncclGetUniqueId(unique_id *id) HAND("unique_id", W id)
int ncclGroupStart(void) HAND("groupStart", 0)
int ncclGroupEnd(void) HAND("groupEnd", 0)
int ncclCommInitRankConfig(word *comm, int size, unique_id id, int rank, void *config)
    HAND("init", W comm, size, W &id, rank)
int ncclCommSplit(word comm, int color, int key, word *made, void *config) HAND("commSplit", comm, color, key, W made)
int ncclCommDestroy(word comm) HAND("destroy", comm)
int ncclCommAbort(word comm) HAND("abort", comm)
int ncclCommGetAsyncError(word comm, int *status) HAND("check_async_error", comm, W status)
int ncclAllReduce(void *s, void *r, size_t n, int type, int op, word comm, word stream)
    HAND("allReduce", comm, W s, W r, n, type, op, stream)
int ncclReduce(void *s, void *r, size_t n, int type, int op, int root, word comm, word stream)
    HAND("reduce", comm, W s, W r, n, type, op, root, stream)
int ncclReduceScatter(void *s, void *r, size_t n, int type, int op, word comm, word stream)
    HAND("reduceScatter", comm, W s, W r, n, type, op, stream)
int ncclBroadcast(void *s, void *r, size_t n, int type, int root, word comm, word stream)
    HAND("broadcast", comm, W s, W r, n, type, root, stream)
int ncclAllGather(void *s, void *r, size_t n, int type, word comm, word stream)
    HAND("allGather", comm, W s, W r, n, type, stream)
int ncclSend(void *s, size_t n, int type, int peer, word comm, word stream) HAND("send", comm, W s, n, type, peer, stream)
int ncclRecv(void *r, size_t n, int type, int peer, word comm, word stream) HAND("recv", comm, W r, n, type, peer, stream)
/* CuPy asks for these, and we do not. */
int ncclBcast(void) { return 5; }
int ncclCommInitAll(void) { return 5; }
int ncclCommCount(void) { return 5; }
int ncclCommCuDevice(void) { return 5; }
int ncclCommUserRank(void) { return 5; }
"""
# The number of each function's arguments, with the communicator.
_COUNTS = {
    "version": 1,
    "unique_id": 1,
    "groupStart": 0,
    "groupEnd": 0,
    "init": 4,
    "commSplit": 4,
    "destroy": 1,
    "abort": 1,
    "check_async_error": 2,
    "allReduce": 7,
    "reduce": 8,
    "reduceScatter": 7,
    "broadcast": 7,
    "allGather": 6,
    "send": 6,
    "recv": 6,
}
_Serve = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_ssize_t))


def build(folder: Path) -> Path:
    """Compile the library."""
    source, library = folder / "fake_nccl.c", folder / "libnccl.so.2"
    source.write_text(SOURCE)
    command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return library


class Server:
    """Carries out the calls of the library."""

    def __init__(self) -> None:
        self._nccl = FakeNccl()
        self._communicators: dict[int, FakeCommunicator] = {}
        self._handles = itertools.count(1)
        self.unexpected: list[BaseException] = []

    def serve(self, name: bytes, arguments: Any) -> int:
        """The status that the function returns."""
        words = [int(arguments[index]) for index in range(_COUNTS[name.decode()])]
        try:
            self._serve(name.decode(), words)
        except NcclError as error:
            return error.status
        except BaseException as error:  # noqa: BLE001 - no exception gets through C
            self.unexpected.append(error)
            return _INTERNAL_ERROR
        return 0

    def _serve(self, name: str, words: list[int]) -> None:
        if name == "version":
            ctypes.c_int.from_address(words[0]).value = self._nccl.get_version()
        elif name == "unique_id":
            ctypes.memmove(words[0], self._nccl.get_unique_id(), 128)
        elif name in ("groupStart", "groupEnd"):
            getattr(self._nccl, name)()
        elif name == "init":
            made, size, unique_id, rank = words
            self._keep(self._nccl.NcclCommunicator(size, ctypes.string_at(unique_id, 128), rank), made)
        elif name == "commSplit":
            part = self._communicator(words[0]).commSplit(words[1], words[2])
            self._keep(part, words[3])
        elif name == "check_async_error":
            ctypes.c_int.from_address(words[1]).value = 0
            self._communicator(words[0]).check_async_error()
        else:
            getattr(self._communicator(words[0]), name)(*words[1:])

    def _communicator(self, handle: int) -> FakeCommunicator:
        if handle not in self._communicators:  # CuPy's handle is 0 after destruction
            raise NcclError(_INVALID, "invalid argument")
        return self._communicators[handle]

    def _keep(self, communicator: FakeCommunicator | None, address: int) -> None:
        handle = 0 if communicator is None else next(self._handles)
        if communicator is not None:
            self._communicators[handle] = communicator
        ctypes.c_ssize_t.from_address(address).value = handle


def load(folder: Path) -> tuple[Any, Server]:
    """The module `cupy.cuda.nccl` over a server of this process."""
    server = Server()
    served = _Serve(server.serve)
    library = ctypes.CDLL(str(build(folder)), mode=ctypes.RTLD_GLOBAL)
    library.fake_nccl_serve(served)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns if there is no driver
        from cupy.cuda import nccl
    server.served = served  # type: ignore[attr-defined]  # as long as the library may call it
    return nccl, server


def refuses(nccl: Any) -> None:
    """Check the calls that CuPy refuses, and that the fakes must refuse, too."""
    with pytest.raises(ValueError, match="commId length 5"):
        nccl.NcclCommunicator(1, b"short", 0)
    with pytest.raises(TypeError, match="commId"):
        nccl.NcclCommunicator(1, "x" * 128, 0)
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    for address, stream in ((None, 0), (torch.zeros(1), 0), (0, object()), (0, 1.5)):
        with pytest.raises(TypeError):
            communicator.allReduce(address, 0, 0, 7, 0, stream)
    communicator.destroy()
    communicator.abort()
    with pytest.raises(nccl.NcclError) as raised:
        communicator.allReduce(0, 0, 1, 7, 0, 0)
    assert raised.value.status == _INVALID


def main(folder: Path) -> None:
    nccl, server = load(folder)
    refuses(nccl)
    for size in (2, 3):
        for name, check in CHECKS.items():
            if name not in NOT_OVER_NCCL:
                run_on_fakes(size, check, reproducible=name == "all_reduce_halves_round_once", nccl=nccl)
    assert not server.unexpected, server.unexpected


if __name__ == "__main__":
    main(Path(sys.argv[3]))
