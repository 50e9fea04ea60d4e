"""Train a model on all ranks and in one process, and compare the results."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from syncline.collectives import ProcessGroup, exchange_objects

from ..distributed_data_parallel import DistributedDataParallel
from ..sync_batch_norm import convert_sync_batchnorm
from .models import CLASSES, FEATURES, MODELS, Model

STEPS = 20
_SHARE = 4
_SMALL_CAP_MB = 256 / 1024**2  # so small that even these models have several buckets
_RTOL, _ATOL = 1e-8, 1e-10


def check_training(group: ProcessGroup, name: str, **options: Any) -> None:
    """Train one of `MODELS` for 20 steps, with four rows of data on each rank in each step, and check the result.

    Every rank calls this function. All numbers are float64. Each rank starts with different weights, which the constructor of
    `DistributedDataParallel` must make equal. Rank 0 also trains the model alone on the rows of all ranks.

    Args:
        group: the group that trains, with any number of ranks.
        name: the model's name.
        options: further options for `DistributedDataParallel`.

    Raises:
        AssertionError: on all ranks, if the trained replicas differ in any bit. On rank 0, if they differ by more than 1e-8
            (relative) from the model that rank 0 has trained alone.
    """
    model = MODELS[name]
    inputs, targets = _data(group.size)
    mine = slice(group.rank * _SHARE, (group.rank + 1) * _SHARE)
    replica = DistributedDataParallel(
        convert_sync_batchnorm(_build(model, seed=group.rank), group),
        process_group=group,
        **{"bucket_cap_mb": _SMALL_CAP_MB, **model.options, **options},
    )
    _train(replica, model, inputs[:, mine], targets[:, mine])
    state = replica.module.state_dict()
    digests = exchange_objects(_digest(state), group=group)
    assert len(set(digests)) == 1, f"'{name}': the replicas differ after {STEPS} steps: {digests}"
    if group.rank == 0:
        local = _build(model, seed=0)
        untrained = _digest(local.state_dict())
        _train(local, model, inputs, targets)
        torch.testing.assert_close(
            dict(state), dict(local.state_dict()), rtol=_RTOL, atol=_ATOL, msg=lambda m: f"'{name}': {m}"
        )
        assert digests[0] != untrained, f"'{name}' has learnt nothing"


def _build(model: Model, *, seed: int) -> torch.nn.Module:
    module = model.build().double()
    # Ranks may be threads that share torch's global generator, so make a separate generator.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def _data(world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(STEPS, world_size * _SHARE, FEATURES, generator=generator, dtype=torch.float64)
    return rows, (rows[..., :CLASSES] + rows[..., -CLASSES:]).argmax(-1)


def _train(module: torch.nn.Module, model: Model, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=model.momentum)
    for step, (rows, classes) in enumerate(zip(inputs, targets, strict=True)):
        optimizer.zero_grad()
        logits = model.prediction(module(rows), step)
        torch.nn.functional.cross_entropy(logits, classes).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _digest(state: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in state.values():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
