"""One rank of a job whose ranks meet through a file: MEETING_JOB RANK WORLD_SIZE FOLDER."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from syncline.collectives import as_process_group
from syncline.collectives.torch_backend import monitored_barrier


def main(rank: int, size: int, folder: str) -> None:
    dist.init_process_group("syncline", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    assert as_process_group(dist.group.WORLD).backend_name == "gloo"
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor.item() == size * (size + 1) / 2
    part = dist.new_group([size - 1])
    if rank == size - 1:
        dist.all_reduce(tensor, group=part)
    assert tensor.item() == size * (size + 1) / 2
    monitored_barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
