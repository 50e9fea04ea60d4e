"""One rank that ends as soon as a future of a torch.distributed group is over, while torch's thread still drops what it called.

Usage: leaving_job.py RANK WORLD_SIZE FOLDER
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from syncline.collectives import TorchGroup


class DroppedSlowly:
    """Torch's thread takes so long to drop it."""

    def __call__(self, done: object) -> None: ...

    def __del__(self) -> None:
        time.sleep(0.5)


class Lingering(list[object]):
    """The end of the interpreter takes longer than that: it is in a cycle, which is left to the last garbage collection."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(1.0)


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    assert dist.group.WORLD is not None
    group = TorchGroup(dist.group.WORLD)
    lingering = Lingering()
    lingering.append(lingering)
    time.sleep(0.5 * rank)  # so that it is not over before somebody asks for a future
    future = group.all_reduce(torch.ones(2), async_op=True).get_future()
    future.then(DroppedSlowly()).wait()


if __name__ == "__main__":
    main()
