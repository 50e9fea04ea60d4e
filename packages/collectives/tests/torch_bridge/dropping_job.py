"""A rank that destroys its group and drops its model just after backward, while torch's thread still drops what it called.

Usage: dropping_job.py RANK WORLD_SIZE FOLDER
"""

import faulthandler
import gc
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from syncline.collectives import TorchGroup

LIMIT_S = 60

droppers: list[threading.Thread] = []


class DroppedSlowly:
    """Torch's thread takes so long to drop it, and needs the GIL afterwards."""

    def __call__(self, done: Any) -> Any:
        return done.value()[0]

    def __del__(self) -> None:
        droppers.append(threading.current_thread())
        time.sleep(1)


def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    assert dist.group.WORLD is not None
    work = TorchGroup(dist.group.WORLD).all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(DroppedSlowly())


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # from a thread that does not need the GIL
    for repetition in range(3):  # torch keeps something of the first model
        dist.init_process_group("gloo", init_method=f"file://{folder}/{repetition}", rank=rank, world_size=world_size)
        train(rank)
        gc.collect()  # what is left of the model
    if rank == 0:
        assert threading.main_thread() not in droppers


def train(rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    model.register_comm_hook(None, hook)
    loss = model(torch.randn(3, 4)).sum()
    time.sleep(0.5 * rank)  # so that rank 0's collective is not over before it asks for the future
    loss.backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
