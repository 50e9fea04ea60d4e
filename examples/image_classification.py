"""Classify images of handwritten digits: mixed precision, a sampler, and a checkpoint from which the script goes on.

    mpirun -n 2 python image_classification.py --epochs 4 --checkpoint digits.pt
    mpirun -n 2 python image_classification.py --epochs 8 --checkpoint digits.pt    # does epochs 5 to 8

Needs scikit-learn, whose wheel holds the images. Each rank uses a GPU of its own where its node has GPUs, else the CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from syncline.collectives import ReduceOp, all_reduce, default_device, destroy_process_group, init_process_group
from syncline.ddp import DistributedDataParallel

TEST_IMAGES = 360


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="train until this epoch (default: 4)")
    parser.add_argument("--batch-size", type=int, default=32, help="images of one rank in each step (default: 32)")
    parser.add_argument("--checkpoint", type=Path, help="save each epoch to this file; if it exists, go on from it")
    return parser.parse_args()


def load() -> tuple[TensorDataset, TensorDataset]:
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = (pixels / 16).float().view(-1, 1, 8, 8)
    train, test = slice(TEST_IMAGES, None), slice(TEST_IMAGES)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 4 * 4, 10),
    )


def main() -> torch.nn.Module:
    options = parse()
    group = init_process_group()
    device = default_device()
    if group.rank == 0:
        print(f"{group.size} ranks over {group.describe()}, rank 0 on {device}", flush=True)

    train, test = load()
    sampler = DistributedSampler(train, group.size, group.rank)  # each rank gets other images
    loader = DataLoader(train, options.batch_size, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    first = 0
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]

    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        total = torch.zeros((), device=device)
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):  # the parameters stay in float32
                loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        total /= len(loader)
        all_reduce(total, ReduceOp.AVG)  # the mean over all ranks, the same on each
        if group.rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item():.4f}", flush=True)
            if options.checkpoint:  # all replicas are equal, so one rank saves
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
                unfinished = options.checkpoint.with_suffix(".unfinished")
                torch.save(state, unfinished)
                unfinished.replace(options.checkpoint)  # a job that is killed here leaves the old file or the new one

    images, labels = (tensor[group.rank :: group.size].to(device) for tensor in test.tensors)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    all_reduce(right, ReduceOp.SUM)
    if group.rank == 0:
        print(f"{100 * right.item() / TEST_IMAGES:.1f} % of the test images are right", flush=True)
    destroy_process_group()
    return model.module


if __name__ == "__main__":
    main()
