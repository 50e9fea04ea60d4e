"""The contenders: our DDP, and torch's DDP over Gloo, each on a copy of one model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from syncline.collectives import ProcessGroup
from syncline.ddp import DistributedDataParallel

from .cases import Case
from .timing import Step
from .trainer import Trainer

Wrap = Callable[[torch.nn.Module], torch.nn.Module]

OURS, NATIVE, ALONE = "ours", "torch", "none"
VIEWS = ", views"
"""Appended to a name: with gradient_as_bucket_view."""


def ours(group: ProcessGroup, **options: Any) -> Wrap:
    """Our DDP on a group."""
    return partial(DistributedDataParallel, process_group=group, **options)


def native(**options: Any) -> Wrap:
    """torch's DDP on torch's default group, which is Gloo's."""
    return partial(torch.nn.parallel.DistributedDataParallel, **options)


def alone(module: torch.nn.Module) -> torch.nn.Module:
    """No synchronisation."""
    return module


def with_hook(wrap: Wrap, make_state: Callable[[torch.nn.Module], object], hook: Callable[..., Any]) -> Wrap:
    """The contender with a communication hook, whose state is made for each module."""

    def wrapped(module: torch.nn.Module) -> torch.nn.Module:
        ddp: Any = wrap(module)
        ddp.register_comm_hook(make_state(module), hook)
        return ddp  # type: ignore[no-any-return]

    return wrapped


def with_and_without_views(group: ProcessGroup, **options: Any) -> dict[str, Wrap]:
    """Ours and torch's, each with and without gradients as views of the buckets, and no synchronisation."""
    return {
        OURS: ours(group, **options),
        OURS + VIEWS: ours(group, gradient_as_bucket_view=True, **options),
        NATIVE: native(**options),
        NATIVE + VIEWS: native(gradient_as_bucket_view=True, **options),
        ALONE: alone,
    }


def counterpart(name: str) -> str:
    """The contender of torch's with which one of ours is compared."""
    return NATIVE + VIEWS if name.endswith(VIEWS) else NATIVE


def trainers(case: Case, wraps: dict[str, Wrap]) -> dict[str, Step]:
    """A step function for each contender: copies of one model, the same batch."""
    model, batch = case.model(), case.batch()
    return {name: Trainer(wrap(copy.deepcopy(model)), case, batch).step for name, wrap in wraps.items()}
