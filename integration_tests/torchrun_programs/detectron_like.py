"""The launcher's part of a detector: a process group of the ranks of each machine, gathered objects, and a shared seed."""

import functools
import os
import pickle

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_LOCAL_GROUP = None


@functools.cache
def global_cpu_group():
    return dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else dist.group.WORLD


def make_local_group(per_machine):
    global _LOCAL_GROUP
    for machine in range(dist.get_world_size() // per_machine):
        ranks = list(range(machine * per_machine, (machine + 1) * per_machine))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            _LOCAL_GROUP = group


def all_gather(data):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, data, group=global_cpu_group())
    return gathered


def reduce_dict(losses):
    with torch.no_grad():
        names = sorted(losses)
        values = torch.stack([losses[name] for name in names])
        dist.reduce(values, dst=0)
        if dist.get_rank() == 0:
            values /= dist.get_world_size()
        return dict(zip(names, values, strict=True))


def shared_seed():
    return all_gather(int.from_bytes(pickle.dumps(os.environ["RANK"])[:2], "big"))[0]


def launch(main, world_size, rank, url, args=()):
    dist.init_process_group(backend="gloo", init_method=url, world_size=world_size, rank=rank)
    make_local_group(int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.barrier()
    main(*args)
    dist.destroy_process_group()


def main(steps):
    torch.manual_seed(shared_seed())
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.ModuleDict({"box": torch.nn.Linear(8, 4), "kind": torch.nn.Linear(8, 3)})["box"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        inputs = torch.linspace(0, 1, 16).view(2, 8) + rank + step
        losses = {"box": model(inputs).abs().mean(), "kind": model(inputs).square().mean()}
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        reduced = reduce_dict(losses)
        if rank == 0:
            print(f"loss {step} {[value.item().hex() for value in reduced.values()]}\n", end="")
        local = torch.tensor(float(rank))
        dist.all_reduce(local, op=dist.ReduceOp.MAX, group=_LOCAL_GROUP)
        assert local.item() == (rank // int(os.environ["LOCAL_WORLD_SIZE"]) + 1) * int(os.environ["LOCAL_WORLD_SIZE"]) - 1
    print(f"loss {rank} {all_gather({'rank': rank})}\n", end="")
    dist.monitored_barrier()


if __name__ == "__main__":
    launch(
        main,
        int(os.environ["WORLD_SIZE"]),
        int(os.environ["RANK"]),
        f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        args=(3,),
    )
