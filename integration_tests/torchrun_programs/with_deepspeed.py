"""DeepSpeed's `init_distributed`, which looks for MPI itself where torchrun's variables are missing, and its collectives."""

import os

import deepspeed
import deepspeed.comm as comm
import torch

# As on nodes without a compiler: else DeepSpeed builds collectives of its own on CPUs, for a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
rank, size = comm.get_rank(), comm.get_world_size()
assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
torch.manual_seed(3)
module = torch.nn.Linear(12, 2)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
for step in range(3):
    loss = module(torch.arange(24.0).view(2, 12).mul(rank + 1 + step).cos()).square().sum()
    optimizer.zero_grad()
    loss.backward()
    for parameter in module.parameters():
        comm.all_reduce(parameter.grad)
        parameter.grad.div_(size)
    optimizer.step()
    print(f"loss {rank} {step} {loss.item().hex()}\n", end="")
comm.barrier()
comm.destroy_process_group()
