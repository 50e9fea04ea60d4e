"""Two ranks that `torch.multiprocessing.spawn` starts; see `test_rendezvous`."""

from __future__ import annotations

import sys
import warnings

import torch

from syncline.collectives import all_reduce, destroy_process_group, init_process_group


def rank_main(rank: int, world_size: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert init_process_group().size == 1
    sys.stdout.writelines(f"alone: {entry.message}\n" for entry in caught)
    destroy_process_group()
    group = init_process_group(rank=rank, world_size=world_size, timeout=60)
    tensor = torch.tensor([rank + 1.0])
    all_reduce(tensor)
    sys.stdout.write(f"rank {group.rank} of {group.size}: sum {tensor.item()}\n")
    destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank_main, args=(2,), nprocs=2)  # type: ignore[no-untyped-call]
