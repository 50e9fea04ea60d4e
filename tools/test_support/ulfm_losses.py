"""Shows how Open MPI itself behaves when ranks die in quick succession: without Syncline, only mpi4py.

    mpirun --with-ft ulfm -n 4 python tools/test_support/ulfm_losses.py SEED

All but two ranks end within 20 ms of one another, the first at a moment drawn from the seed. The remaining two shrink until
they agree, add for another second, and print "done". With Open MPI 5.0.11 about one run in five does not end: the two wait in
MPI_Finalize (`ompi_mpi_finalize`, as gdb shows).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import numpy as np
from mpi4py import MPI


def die_soon(rank: int, size: int, seed: str) -> None:
    """Kill this rank soon, if the seed has chosen it."""
    victims = random.Random(seed).sample(range(size), size - 2)
    if rank in victims:
        after_s = random.Random(f"{seed} first").uniform(0.3, 0.5)
        if rank != victims[0]:
            after_s += random.Random(f"{seed} {rank}").uniform(0.0, 0.02)
        threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()


def shrunk(communicator: MPI.Intracomm) -> MPI.Intracomm:
    """A communicator of the living ranks, over which they could make another one."""
    while True:
        if not communicator.Is_revoked():
            communicator.Revoke()
        communicator = MPI.Intracomm(communicator.Shrink())
        made: MPI.Intracomm | None = None
        try:
            made = communicator.Dup()
            made.allgather(made.Get_rank())
            is_made = True
        except MPI.Exception:
            is_made = False
        try:
            if communicator.Agree(int(is_made)) and made is not None:
                return made
        except MPI.Exception:
            pass  # another rank died; the answer is the same on all


def main(seed: str) -> None:
    """Add until a second has passed for all remaining ranks."""
    communicator = MPI.COMM_WORLD.Dup()
    die_soon(communicator.Get_rank(), communicator.Get_size(), seed)
    end, is_over = time.time() + 1.5, False
    while not is_over:
        total = np.full(5000, float(time.time() > end))
        try:
            request = communicator.Iallreduce(MPI.IN_PLACE, total, MPI.SUM)
            while not request.Test():
                time.sleep(0)
            is_over = total[0] > 0
        except MPI.Exception:
            communicator = shrunk(communicator)
    print(f"done with {communicator.Get_size()} ranks", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
