"""One random collective, the same on every rank, for the jobs of the chaos test and of the soak."""

from __future__ import annotations

import random

import torch

from syncline import collectives as sc

_NAMES = ("all_reduce", "all_reduce", "async", "broadcast", "gather", "barrier", "scatter")


def issue(draw: random.Random, group: sc.ProcessGroup, tensor: torch.Tensor, *, works: int = 1) -> None:
    """Issue a collective on a tensor that is the same on every rank. The result of an all-reduce is checked.

    Args:
        draw: in the same state on every rank.
        group: all its ranks call.
        tensor: one dimension, all elements the same small number; its contents may be changed.
        works: how many pieces an asynchronous all-reduce is issued in.
    """
    name = draw.choice(_NAMES)
    if name == "all_reduce":
        expected = tensor[-1] * group.size
        group.all_reduce(tensor)
        assert tensor[-1] == expected
    elif name == "async":
        issued = [group.all_reduce(piece, async_op=True) for piece in tensor.chunk(works)]
        for work in issued:
            work.wait()
    elif name == "broadcast":
        group.broadcast(tensor, draw.randrange(group.size))
    elif name == "gather":
        group.all_gather_into_tensor(tensor.new_empty(tensor.numel() * group.size), tensor)
    elif name == "scatter":
        group.reduce_scatter_tensor(torch.empty_like(tensor), tensor.repeat(group.size))
    else:
        group.barrier()
