"""Reading another process's memory, and finding out whether one may."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from syncline.collectives import TransportError
from syncline.collectives.backends.mpi.node.peer_memory import Introduction, PeerMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cross-memory attach is Linux's")

NOBODY = 2**22 + 1  # above the largest process number that Linux gives


def test_it_reads_what_is_there() -> None:
    source = torch.arange(100_000, dtype=torch.float64)
    target = torch.zeros(500, dtype=torch.float64)
    PeerMemory([NOBODY, os.getpid()]).read(1, source.data_ptr() + 8 * 7, target.data_ptr(), target.nbytes)
    assert torch.equal(target, source[7:507])


def test_it_reads_another_process() -> None:
    program = "import ctypes; b = ctypes.create_string_buffer(b'hello'); print(ctypes.addressof(b), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        address = int(other.stdout.readline())
        seen = torch.zeros(5, dtype=torch.uint8)
        PeerMemory([other.pid]).read(0, address, seen.data_ptr(), seen.nbytes)
        other.stdin.write("\n")
    assert bytes(seen.tolist()) == b"hello"


@pytest.mark.parametrize(("pid", "address", "words"), [(NOBODY, 0, "No such process"), (os.getpid(), 8, "Bad address")])
def test_who_cannot_be_read_is_named(pid: int, address: int, words: str) -> None:
    with pytest.raises(TransportError, match=rf"rank 1 of this node \(process {pid}\): {words}"):
        PeerMemory([0, pid]).read(1, address, torch.zeros(1).data_ptr(), 4)


def test_an_introduction_is_believed_only_if_its_token_lies_there() -> None:
    me, other = Introduction(), Introduction()
    assert me.answered([me.words, other.words], 0) is not None
    pid, address, *_ = other.words
    assert me.answered([me.words, [pid, address, 1, 2]], 0) is None  # another process has that number here
    assert me.answered([me.words, [NOBODY, address, 1, 2]], 0) is None
