"""The data: scikit-learn's handwritten digits, 1,797 images of 8 x 8 pixels, which are part of its wheel."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TRAIN_IMAGES = 1437
SPLIT_SEED = 0


def load() -> tuple[TensorDataset, TensorDataset]:
    """The images for training and those for the test, four to one, each digit in the same proportion; always the same split.

    Images are float32 `[n, 1, 8, 8]` between 0 and 1, labels int64 `[n]`.
    """
    pixels, digits = load_digits(return_X_y=True)
    split = train_test_split(pixels, digits, train_size=TRAIN_IMAGES, random_state=SPLIT_SEED, stratify=digits)
    train_pixels, test_pixels, train_digits, test_digits = (torch.from_numpy(part) for part in split)
    return _dataset(train_pixels, train_digits), _dataset(test_pixels, test_digits)


def loader_of_rank(
    train: TensorDataset, rank: int, ranks: int, batch_size: int, seed: int
) -> DataLoader[tuple[torch.Tensor, ...]]:
    """One rank's part of every batch; `batch_size` counts the images of all ranks together."""
    sampler: DistributedSampler[tuple[torch.Tensor, ...]]
    sampler = DistributedSampler(train, num_replicas=ranks, rank=rank, seed=seed)
    return DataLoader(train, batch_size=batch_size // ranks, sampler=sampler, drop_last=True)


def first_batch_of_one_process(train: TensorDataset, batch_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole first batch, as a single process would see it: the ranks' parts of it, taken in turns."""
    images, labels = next(iter(loader_of_rank(train, 0, 1, batch_size, seed)))
    return images, labels


def _dataset(pixels: torch.Tensor, digits: torch.Tensor) -> TensorDataset:
    return TensorDataset((pixels / 16).float().reshape(-1, 1, 8, 8), digits.long())
