"""One rank of a job whose ranks meet through a file: MEETING_JOB RANK WORLD_SIZE FOLDER.

They meet for torch.distributed first, then for a default group of ours, which torch.distributed is given as well.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from syncline.collectives import (
    GroupClosedError,
    as_process_group,
    barrier,
    broadcast,
    destroy_process_group,
    get_default_group,
    init_process_group,
)
from syncline.collectives.torch_backend import monitored_barrier, share_default_group


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
    share(rank, size, folder)


def share(rank: int, size: int, folder: str) -> None:
    ours = init_process_group("gloo", init_method=f"file://{folder}/ours", rank=rank, world_size=size)
    share_default_group()
    assert (dist.get_rank(), dist.get_world_size(), get_default_group()) == (rank, size, ours)
    assert as_process_group(dist.group.WORLD) is ours
    for group in (None, dist.new_group(range(size)), dist.new_group(backend="gloo")):
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == size * (size + 1) / 2
    without_rank_0 = dist.new_group(range(1, size), backend="gloo")
    if rank > 0:
        wrapped = as_process_group(without_rank_0)
        assert wrapped.ranks == tuple(range(1, size))
        broadcast(tensor.fill_(rank), src=size - 1, group=wrapped)
        assert tensor.item() == size - 1
    dist.destroy_process_group()
    barrier()  # ours is open
    share_default_group()
    destroy_process_group()
    try:
        dist.all_reduce(tensor)
    except GroupClosedError:
        dist.destroy_process_group()
    else:
        raise AssertionError("the group was closed")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
