"""Learn handwritten digits, and go on when a rank is killed.

    export WORLD_SIZE=3
    for rank in 0 1 2; do RANK=$rank python elastic.py --meet here --kill 1 & done; wait

Most launchers end a job that has lost a rank, so the shell starts the ranks here. They
meet in the folder `here`. Rank 1 ends itself in the second epoch; the other two do that
step again without it, and train to the end. Under Slurm:

    srun --no-kill --kill-on-bad-exit=0 python elastic.py --meet here-$SLURM_JOB_ID

Needs scikit-learn, whose wheel holds the images.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from syncline.collectives import (
    ReduceOp,
    all_reduce,
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
)
from syncline.ddp import DistributedDataParallel, Elastic, ElasticSampler


def main() -> torch.nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--meet", type=Path, required=True, help="a folder all ranks see")
    parser.add_argument("--kill", type=int, help="this rank ends itself in epoch 2")
    options = parser.parse_args()

    group = init_process_group("gloo", f"file://{options.meet.resolve()}")
    first_rank = group.rank  # ranks are numbered anew when one is lost
    if group.rank == 0:
        print(f"{group.size} ranks at the start", flush=True)
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    data = TensorDataset((pixels / 16).float(), labels)
    # `batch_size` counts the images of all ranks: fewer ranks take more of them each.
    sampler = ElasticSampler(len(data), batch_size=96)
    loader = DataLoader(data, batch_sampler=sampler)
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    elastic = Elastic(model, optimizer, sampler)

    for epoch in elastic.epochs(options.epochs):
        sampler.set_epoch(epoch)
        total, steps = torch.zeros(()), 0
        for images, digits in elastic.batches(loader):
            if epoch == 1 and steps == 5 and first_rank == options.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            with elastic.step():  # all ranks that live apply it, or all do it again
                optimizer.zero_grad()
                # The weight matters where a rank has one image more than another.
                loss = F.cross_entropy(model(images), digits) * sampler.weight
                loss.backward()
                optimizer.step()
                total, steps = total + loss.detach(), steps + 1
        total /= steps
        all_reduce(total, ReduceOp.AVG)  # now it is the same on all ranks
        if get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {total.item():.4f}", flush=True)

    if get_rank() == 0:
        lost = ", ".join(map(str, elastic.lost_ranks)) or "none"
        print(f"ranks at the end: {get_world_size()}, lost: {lost}", flush=True)
    destroy_process_group()
    return model.module


if __name__ == "__main__":
    main()
