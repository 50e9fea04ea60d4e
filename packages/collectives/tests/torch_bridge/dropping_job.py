"""One rank that destroys its group and drops its model just after backward, while torch's thread still drops what it called.

Usage: dropping_job.py RANK WORLD_SIZE FOLDER
"""

import faulthandler
import time
from typing import Any

import torch
import torch.distributed as dist

from syncline.collectives import TorchGroup

LIMIT_S = 60


class DroppedSlowly:
    """Torch's thread takes so long to drop it, and needs the GIL afterwards."""

    def __call__(self, done: Any) -> Any:
        return done.value()[0]

    def __del__(self) -> None:
        time.sleep(1)


def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    assert dist.group.WORLD is not None
    work = TorchGroup(dist.group.WORLD).all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(DroppedSlowly())


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # from a thread that does not need the GIL
    for _ in range(3):  # torch keeps something of the first model
        train()


def train() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    model.register_comm_hook(None, hook)
    model(torch.randn(3, 4)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
