"""Classify images of handwritten digits, with mixed precision and checkpoints.

    mpirun -n 2 python image_classification.py --epochs 4 --checkpoint digits.pt
    mpirun -n 2 python image_classification.py --epochs 8 --checkpoint digits.pt

The second command goes on from the checkpoint, and trains the epochs 5 to 8. Needs
scikit-learn, whose wheel holds the images.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from syncline.collectives import (
    ReduceOp,
    all_reduce,
    default_device,
    destroy_process_group,
    init_process_group,
)
from syncline.ddp import DistributedDataParallel

TEST_IMAGES = 360


def load() -> tuple[TensorDataset, TensorDataset]:
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = (pixels / 16).float().view(-1, 1, 8, 8)
    train = TensorDataset(images[TEST_IMAGES:], labels[TEST_IMAGES:])
    return train, TensorDataset(images[:TEST_IMAGES], labels[:TEST_IMAGES])


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
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="images of one rank")
    parser.add_argument("--checkpoint", type=Path, help="save here, and go on from here")
    options = parser.parse_args()

    group = init_process_group()
    device = default_device()  # a GPU of its own for each rank, where there are GPUs
    if group.rank == 0:
        print(f"{group.size} ranks over {group.describe()}", flush=True)
    train, test = load()
    sampler = DistributedSampler(
        train, group.size, group.rank
    )  # other images for each rank
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
            # The parameters stay in float32; autocast chooses a dtype for each operation.
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        total /= len(loader)
        all_reduce(total, ReduceOp.AVG)  # now it is the same on all ranks
        if group.rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item():.4f}", flush=True)
            if options.checkpoint:
                saved = {"model": model.module.state_dict(), "epoch": epoch + 1}
                save(options.checkpoint, {**saved, "optimizer": optimizer.state_dict()})

    images, labels = (part[group.rank :: group.size].to(device) for part in test.tensors)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    all_reduce(right, ReduceOp.SUM)
    if group.rank == 0:
        print(f"{100 * right.item() / TEST_IMAGES:.1f} % of the test images are right")
    destroy_process_group()
    return model.module


def save(path: Path, state: dict[str, object]) -> None:
    """One rank saves, as all replicas are equal. If it is killed, the old file stays."""
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


if __name__ == "__main__":
    main()
