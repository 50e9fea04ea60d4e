"""A start method for processes, workers of a DataLoader that it starts, and classes that they find in `__main__`."""

import multiprocessing
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Squares(Dataset):
    """Lives in `__main__`: a worker finds it there again."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert multiprocessing.parent_process() is not None
        return torch.tensor([index, index**2, index % 7], dtype=torch.float32) / 50


def collate(rows):
    return torch.stack(rows)


def square(number):
    return number * number, os.environ["RANK"]


def main():
    mp.set_start_method("spawn")
    dist.init_process_group("gloo")
    data = Squares(24)
    loader = DataLoader(
        data, batch_size=4, num_workers=1, sampler=DistributedSampler(data), collate_fn=collate, persistent_workers=True
    )
    torch.manual_seed(2)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
        print(f"loss {dist.get_rank()} {epoch} {loss.item().hex()}\n", end="")
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(square, [3, 4]) == [(9, os.environ["RANK"]), (16, os.environ["RANK"])]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
