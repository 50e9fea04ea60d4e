"""One rank of a job in which a rank is killed, stopped or late at a random moment: `chaos_job.py BACKEND FOLDER SEED WHAT`.

All ranks issue the same random collectives, drawn from the seed. The victim is drawn, too. A separate thread hits it, so the
hit may come at any moment: in a collective, between two, inside the library. Each survivor writes its error to
FOLDER/seen-RANK.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from syncline import collectives as sc
from test_support.random_collectives import issue

TIMEOUT_S = 6.0
DELAY_S = 1.5
_MOST_CALLS = 100_000
_SIZES = (1, 1000, 20_000, 1_000_000)
_PATIENCE_S = 60.0


def hit(what: str, after_s: float, folder: Path) -> None:
    """Kill, stop or delay this process after that many seconds."""
    time.sleep(after_s)
    (folder / "victim").write_text(json.dumps({"pid": os.getpid(), "when": time.time()}))
    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)


def main(backend: str, folder: Path, seed: int, what: str) -> None:
    """Issue collectives until something is wrong."""
    draw = random.Random(seed)
    if backend == "gloo":
        rank, size = int(os.environ["CHAOS_RANK"]), int(os.environ["CHAOS_SIZE"])
        sc.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=600.0)
    else:
        sc.init_process_group("mpi", timeout=600.0)
    group = sc.get_default_group()
    group.timeout_s = TIMEOUT_S
    victim, after_s, delayed = draw.randrange(group.size), draw.uniform(0.0, 1.0), draw.randrange(40)
    group.barrier()
    if group.rank == victim and what in ("kill", "stop"):
        threading.Thread(target=hit, args=(what, after_s, folder), daemon=True).start()
    try:
        for step in range(_MOST_CALLS if what != "delay" else 40):
            if group.rank == victim and what == "delay" and step == delayed:
                time.sleep(DELAY_S)
            issue(draw, group, torch.full((draw.choice(_SIZES),), float(step % 7)))
        seen: dict[str, object] = {"error": None}
    except sc.TransportError as error:
        ranks = error.ranks if isinstance(error, sc.RankLostError) else ()
        seen = {"error": type(error).__name__, "ranks": ranks, "when": time.time(), "words": str(error)}
    (folder / f"part-{group.rank}").write_text(json.dumps(seen))
    (folder / f"part-{group.rank}").rename(folder / f"seen-{group.rank}")
    others = [folder / f"seen-{rank}" for rank in range(group.size) if rank != victim or what == "delay"]
    end = time.monotonic() + _PATIENCE_S
    while not all(other.exists() for other in others) and time.monotonic() < end:
        time.sleep(0.05)  # a survivor that ends earlier would count as lost, too
    if what == "delay":
        sc.destroy_process_group()
    else:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
