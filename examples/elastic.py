"""Learn handwritten digits, and go on when a rank is killed.

The ranks are processes that no launcher watches, for most launchers end a job that has lost a rank. They meet in an empty folder
that all of them see:

    for rank in 0 1 2; do RANK=$rank WORLD_SIZE=3 MASTER_ADDR=none python elastic.py --meet meeting --kill 1 & done; wait

Here rank 1 ends itself in the second epoch. Rank 0 and rank 2 do that step again without it, and train to the end. Under Slurm:

    srun --no-kill --kill-on-bad-exit=0 python elastic.py --meet /shared/meeting-$SLURM_JOB_ID

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

from syncline.collectives import ReduceOp, all_reduce, destroy_process_group, get_rank, get_world_size, init_process_group
from syncline.ddp import DistributedDataParallel, Elastic, ElasticSampler


def main() -> torch.nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="default: 4")
    parser.add_argument("--meet", type=Path, required=True, help="a folder that all ranks see; it is made, and removed at the end")
    parser.add_argument("--kill", type=int, help="this rank ends itself in the second epoch, to show what happens")
    options = parser.parse_args()

    group = init_process_group("gloo", f"file://{options.meet.resolve()}")
    first_rank = group.rank  # a rank's number may change when others are lost
    if group.rank == 0:
        print(f"{group.size} ranks at the start", flush=True)
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    data = TensorDataset((pixels / 16).float(), labels)
    sampler = ElasticSampler(len(data), batch_size=96)  # images of all ranks; divided anew when a rank is lost
    loader = DataLoader(data, batch_sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    elastic = Elastic(model, optimizer, sampler)

    for epoch in elastic.epochs(options.epochs):
        sampler.set_epoch(epoch)
        total, steps = torch.zeros(()), 0
        for images, digits in elastic.batches(loader):
            if epoch == 1 and steps == 5 and first_rank == options.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            with elastic.step():  # applied on all ranks that live, or on none and done again
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), digits) * sampler.weight  # shares may differ by one image
                loss.backward()
                optimizer.step()
                total, steps = total + loss.detach(), steps + 1
        total /= steps
        all_reduce(total, ReduceOp.AVG)
        if get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {total.item():.4f}", flush=True)

    if get_rank() == 0:
        print(f"{get_world_size()} ranks at the end, lost: {elastic.lost_ranks or 'none'}", flush=True)
    destroy_process_group()
    return model.module


if __name__ == "__main__":
    main()
