"""One rank of a job over Gloo of which some are killed in a collective; see `test_shrink`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from syncline.collectives import ProcessGroup, TransportError, destroy_process_group, init_process_group

STEPS = 20


def total(group: ProcessGroup) -> float:
    tensor = torch.full((1000,), float(10**group.rank))
    group.all_reduce(tensor)
    return tensor[-1].item()


def main(rank: int, world_size: int, folder: Path) -> None:
    killed = set(map(int, (folder / "killed").read_text().split()))
    group = init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world_size, timeout=60)
    assert group.missing_for_shrink() is None
    for _ in range(STEPS):
        assert total(group) == 1111
    if rank in killed:
        os.kill(os.getpid(), signal.SIGKILL)
    began_s = time.perf_counter()
    try:
        while True:
            total(group)
    except TransportError as error:
        print(f"noticed after {time.perf_counter() - began_s:.3f} s: {error}", flush=True)
    group = group.shrink(patience_s=30)
    print(f"went on after {time.perf_counter() - began_s:.3f} s", flush=True)
    survivors = [other for other in range(world_size) if other not in killed]
    assert (group.rank, group.size) == (survivors.index(rank), len(survivors))
    for _ in range(STEPS):
        assert total(group) == sum(10**number for number in range(group.size))
    part = group.split(group.rank % 2)  # sub-groups are made anew
    assert part is not None
    assert total(part) == sum(10**number for number in range(part.size))
    part.close()
    group.close()
    destroy_process_group()  # the group that lost its ranks; it was aborted


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
