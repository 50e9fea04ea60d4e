"""Rank 1 leaves with a status of its own, while the others wait for it."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.arange(3.0) * (dist.get_rank() + 1)
dist.all_reduce(tensor)
print(f"loss {dist.get_rank()} {tensor.tolist()}\n", end="", flush=True)
dist.barrier()
if dist.get_rank() == 1:
    sys.exit(3)
dist.all_reduce(tensor)
print("not reached")
