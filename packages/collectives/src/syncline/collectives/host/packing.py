"""Between tensors and the flat blocks, in plain order, that a transport moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..contract.layout import flat, in_plain_order, mark_written


def flat_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in plain order: the tensor itself, seen flat, where it is in plain order."""
    return flat(in_plain_order(tensor))


def copy_back(wire: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the copy in plain order back to the tensor that it stands for; autograd learns that the tensor was written."""
    if wire is tensor:
        mark_written(tensor)
    else:
        tensor.copy_(wire)


def empty_block(part: torch.Tensor, size: int) -> torch.Tensor:
    """Room for `size` tensors like `part`."""
    return torch.empty(size * part.numel(), dtype=part.dtype, device=part.device)


def unpack(block: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copy each part of a block to its tensor."""
    for output, part in zip(outputs, block.view(len(outputs), block.numel() // len(outputs)), strict=True):
        output.copy_(part.view(output.shape))
