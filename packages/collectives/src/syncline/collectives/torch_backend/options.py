"""What torch.distributed says in the options of a call, in our words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from ..contract.reduce_op import ReduceOp, Reduction
from ..contract.torch_reduction import from_torch
from ..errors import InvalidArgumentError


def reduction_of(options: Any) -> Reduction:
    """The reduction that options (or a reduction of torch's in their place) name; SUM without any.

    Raises:
        InvalidArgumentError: we have no such reduction.
    """
    if options is None:
        return ReduceOp.SUM
    op = getattr(options, "reduceOp", options)
    ours = from_torch(op)
    if ours is None:
        raise InvalidArgumentError(f"expected a reduction of torch.distributed such as ReduceOp.SUM, found {op!r}")
    return ours


def word(reduction: Reduction) -> str | None:
    """What torch's functional operators call a reduction; None if they have no word for it."""
    return reduction.value if isinstance(reduction, ReduceOp) else None


def root_of(options: Any) -> int:
    """The root that options (or a number in their place) name; 0 without any."""
    if options is None:
        return 0
    return options if isinstance(options, int) else int(options.rootRank)


def check_first_device(options: Any, tensors: Sequence[torch.Tensor], call: str) -> None:
    """Refuse a root tensor other than the first: each process has one device, and one tensor.

    Raises:
        InvalidArgumentError: the options name another one.
    """
    index = getattr(options, "rootTensor", 0)
    if not 0 <= index < len(tensors):
        raise InvalidArgumentError(f"{call}: expected rootTensor in 0..{len(tensors) - 1}, found {index}")


def time_limit_s(timeout: timedelta | None) -> float | None:
    """A time limit of torch's in seconds; None if it stands for the group's own (torch then says zero or less)."""
    if timeout is None or timeout.days < 0 or not timeout:
        return None
    return timeout.total_seconds()


def listed(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a call: torch's groups take one tensor, or a list of those of several devices."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def some(tensors: Any, call: str) -> list[Any]:
    """The entries of a list.

    Raises:
        InvalidArgumentError: there are none.
    """
    entries = list(tensors)
    if not entries:
        raise InvalidArgumentError(f"{call}: expected at least one tensor, found an empty list")
    return entries


def only(tensors: Any, what: str) -> Any:
    """The one entry of a list for several devices of one process, of which we serve one.

    Raises:
        InvalidArgumentError: there are more, or none.
    """
    if len(tensors) != 1:
        raise InvalidArgumentError(f"expected one {what}, for one device in each process, found {len(tensors)}")
    return tensors[0]
