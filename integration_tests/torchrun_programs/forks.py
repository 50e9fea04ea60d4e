"""Forks before the group is made, where the child ends with its exit handlers and a status, and in the middle of training."""

import atexit
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

reading, writing = os.pipe()
child = os.fork()
if child == 0:
    atexit.register(os.write, writing, b"the child's handler")
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert os.read(reading, 100) == b"the child's handler"

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(6, 2))


def step(number):
    loss = model(torch.arange(12.0).view(2, 6).mul(rank + number + 1).sin()).sum()
    loss.backward()
    print(f"loss {rank} {number} {loss.item().hex()}\n", end="", flush=True)


step(0)
child = os.fork()
if child == 0:
    os._exit(int(os.environ["RANK"]) + 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == rank + 1
step(1)
dist.destroy_process_group()
