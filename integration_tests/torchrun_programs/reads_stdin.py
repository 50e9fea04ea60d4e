"""Rank 0 reads its standard input, and tells the others."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
lines = [sys.stdin.read().split("\n") if dist.get_rank() == 0 else None]
dist.broadcast_object_list(lines, src=0)
numbers = torch.tensor([float(line) for line in lines[0] if line]) * (dist.get_rank() + 1)
dist.all_reduce(numbers)
print(f"loss {dist.get_rank()} {[number.hex() for number in numbers.tolist()]}\n", end="")
dist.destroy_process_group()
