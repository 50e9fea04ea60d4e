"""Native DDP in the most usual form: env://, LOCAL_RANK from the environment, a DistributedSampler, one summary on rank 0."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as scripts have it
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    assert dist.get_backend() == "gloo"
    assert local_rank == rank
    torch.manual_seed(17 + rank)  # another model on each rank: rank 0's counts
    model = DDP(torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5)))
    features = torch.randn(96, 20, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(features, features.sum(1).abs().long() % 5)
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        print(f"loss {rank} {epoch} {loss.item().hex()} {(total / world_size).item().hex()}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
