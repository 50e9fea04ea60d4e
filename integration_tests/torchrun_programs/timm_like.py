"""The launcher's part of an image trainer: torchrun's variables, else Slurm's; and a model that is averaged by hand."""

import argparse
import contextlib
import copy
import os
import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def init_distributed_device(args):
    args.world_size, args.rank, args.local_rank, args.distributed = 1, 0, 0, False
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 or int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        if "SLURM_PROCID" in os.environ and "RANK" not in os.environ:
            args.rank, args.world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
            dist.init_process_group(args.backend, init_method=args.url, world_size=args.world_size, rank=args.rank)
        else:
            args.local_rank = int(os.environ["LOCAL_RANK"])
            dist.init_process_group(backend=args.backend, init_method=args.url)
            args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
        args.distributed = True
    return torch.device(f"cuda:{args.local_rank}" if torch.cuda.is_available() else "cpu")


def reduce_tensor(tensor, size):
    total = tensor.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total / size


parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="gloo")
parser.add_argument("--url", default="env://")
args = parser.parse_args()
device = init_distributed_device(args)
assert args.distributed
torch.manual_seed(42 + args.rank)
random.seed(42 + args.rank)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten())
model.append(torch.nn.Linear(8 * 6 * 6, 10))
average = copy.deepcopy(model)
model = DistributedDataParallel(model, broadcast_buffers=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
for update in range(3):
    for micro in range(2):
        images = torch.randn(4, 3, 8, 8)
        targets = torch.tensor([random.randrange(10) for _ in range(4)])
        with model.no_sync() if micro == 0 else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(model(images), targets) / 2
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for kept, new in zip(average.parameters(), model.module.parameters(), strict=True):
            kept.lerp_(new, 0.1)
    mean = reduce_tensor(loss.detach(), args.world_size)
    print(f"loss {args.rank} {update} {loss.item().hex()} {mean.item().hex()}\n", end="")
for name, buffer in model.module.named_buffers():  # running statistics, as the last epoch's end makes them alike
    if "running" in name:
        dist.all_reduce(buffer)
        buffer.div_(args.world_size)
        print(f"loss {args.rank} {name} {buffer.sum().item().hex()}\n", end="")
dist.destroy_process_group()
