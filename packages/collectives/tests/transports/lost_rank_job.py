"""One rank of a Gloo job in which a rank ends in the middle; run as `lost_rank_job.py RANK SIZE FOLDER`.

What the survivors see is in `seen-RANK`: the error's type, its ranks, its words, and after how many seconds it came.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from syncline import collectives as sc
from syncline.collectives.transports import gloo

LOST = 1
TIMEOUT_S = 20.0


def die(*_: object) -> None:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def main(rank: int, size: int, folder: Path) -> None:
    case = (folder / "case").read_text()
    began = time.monotonic()
    try:
        sc.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=TIMEOUT_S)
        group = sc.get_default_group()
        group.barrier()
        began = time.monotonic()
        if rank == LOST and case == "split":
            gloo._connect_patiently = die  # after this rank has met the others in the store
        elif rank == LOST:
            die()
        if case == "split":
            group.split(0)
        elif case == "recv":
            sc.recv(torch.zeros(4), src=LOST)
        else:
            sc.all_reduce(torch.ones(4))
    except sc.TransportError as error:
        ranks = getattr(error, "ranks", ())
        seen = f"{type(error).__name__}\n{list(ranks)}\n{time.monotonic() - began}\n{error}"
        (folder / f"seen-{rank}").write_text(seen)
    others = [folder / f"seen-{other}" for other in range(size) if other != LOST]
    while not all(other.exists() for other in others):  # a survivor that ends before is lost, too
        time.sleep(0.05)
    if case != "split":
        os._exit(0)


main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
