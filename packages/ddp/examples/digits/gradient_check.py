"""Is the averaged gradient the one that a single process computes on the whole batch?"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from model import BUCKET_CAP_MB
from syncline.collectives import ProcessGroup, ReduceOp
from syncline.ddp import DistributedDataParallel

TOLERANCE = 1e-5
"""What rounding may do in float32; one wrong image in a batch of 96 makes ten thousand times more."""


def largest_relative_difference(
    network: torch.nn.Module, part: list[torch.Tensor], whole: tuple[torch.Tensor, torch.Tensor], group: ProcessGroup
) -> float:
    """Compare the gradients of copies of the network, which itself stays as it is. A collective.

    The copies are in evaluation mode, with the statistics of the whole batch: in training mode batch normalisation would use
    those of each rank's part, and the gradients would rightly differ.

    Args:
        network: not wrapped; it may differ between ranks, rank 0's counts.
        part: this rank's images and labels; as many on every rank.
        whole: the images and labels of all ranks.
        group: whose ranks average.

    Returns:
        The largest over the parameters of max|a - b| / max|b|, with a the averaged gradient and b that of a single process;
        over all ranks, so every rank gets the same number.
    """
    replica = DistributedDataParallel(_prepared(network, whole[0]), process_group=group, bucket_cap_mb=BUCKET_CAP_MB)
    alone = copy.deepcopy(network).eval()
    alone.load_state_dict(replica.module.state_dict())
    F.cross_entropy(replica(part[0]), part[1]).backward()
    F.cross_entropy(alone(whole[0]), whole[1]).backward()
    pairs = zip(replica.module.parameters(), alone.parameters(), strict=True)
    largest = torch.stack([_relative_difference(a.grad, b.grad) for a, b in pairs]).max()
    group.all_reduce(largest, ReduceOp.MAX)
    return float(largest)


def _prepared(network: torch.nn.Module, images: torch.Tensor) -> torch.nn.Module:
    """A copy in evaluation mode with the statistics of these images, so that its activations are as in training."""
    copied = copy.deepcopy(network).train()
    for layer in copied.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = None  # the plain average of all batches that it has seen, so of this one
    with torch.no_grad():
        copied(images)
    return copied.eval()


def _relative_difference(averaged: torch.Tensor | None, alone: torch.Tensor | None) -> torch.Tensor:
    assert averaged is not None
    assert alone is not None
    difference = (averaged - alone).abs().max()
    return difference / alone.abs().max() if difference != 0 else difference
