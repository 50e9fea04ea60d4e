"""A script that also imports mpi4py: it starts MPI as mpi4py has it documented, and ends it."""

import os

import mpi4py
import torch
import torch.distributed as dist

mpi4py.rc.initialize = False
from mpi4py import MPI  # noqa: E402

if not MPI.Is_initialized():
    MPI.Init_thread()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 2))
loss = model(torch.arange(14.0).view(2, 7) * (rank + 1)).sin().sum()
loss.backward()
grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
print(f"loss {rank} {loss.item().hex()} {grads.sum().item().hex()}\n", end="", flush=True)
if MPI.COMM_WORLD.Get_size() > 1:  # under torchrun each process is alone for MPI
    assert MPI.COMM_WORLD.allreduce(rank) == sum(range(dist.get_world_size()))
    assert MPI.COMM_WORLD.Get_rank() == int(os.environ["RANK"])
dist.destroy_process_group()
MPI.Finalize()
