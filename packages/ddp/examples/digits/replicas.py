"""Are the replicas on all ranks the same, bit by bit?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from syncline.collectives import ProcessGroup, exchange_objects


def replicas_are_identical(model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: ProcessGroup) -> bool:
    """Compare the bytes of all ranks' parameters, buffers and momenta; the same answer on every rank. A collective.

    Buffers (running statistics of batch normalisation) are each rank's own after a forward in training, and become rank 0's
    at the start of the next forward. So call this after an evaluation.
    """
    digest = hashlib.sha256()
    for tensor in _state(model, optimizer):
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return len(set(exchange_objects(digest.hexdigest(), group=group))) == 1


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for parameter in model.parameters():
        held = optimizer.state.get(parameter, {})
        yield from (held[key] for key in sorted(held) if isinstance(held[key], torch.Tensor))
