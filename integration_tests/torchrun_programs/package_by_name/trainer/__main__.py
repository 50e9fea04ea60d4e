"""`-m trainer`: a package with a main module."""

import pathlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .steps import loss_of

assert __spec__.name == "trainer.__main__"
assert __package__ == "trainer"
assert pathlib.Path(sys.argv[0]) == pathlib.Path(__file__)
assert sys.argv[1:] == ["--steps", "3"]
dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(9, 4))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
for step in range(int(sys.argv[2])):
    optimizer.zero_grad()
    loss = loss_of(model, dist.get_rank(), step)
    loss.backward()
    optimizer.step()
    print(f"loss {dist.get_rank()} {step} {loss.item().hex()}\n", end="")
dist.destroy_process_group()
