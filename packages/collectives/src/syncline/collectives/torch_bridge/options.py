"""Translate the options of torch.distributed's calls to our arguments."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ..reduce_op import ReduceOp, Reduction, from_torch


def reduction_of(options: Any) -> Reduction:
    """The reduction that torch's options name. `options` may also be one of torch's reductions. None means SUM.

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
    """The text by which torch's functional operators name a reduction, such as "sum"; None if they have no text for it."""
    return reduction.value if isinstance(reduction, ReduceOp) else None


def root_of(options: Any) -> int:
    """The root that torch's options name. `options` may also be the root's number. None means 0."""
    if options is None:
        return 0
    return options if isinstance(options, int) else int(options.rootRank)


def check_first_device(options: Any, tensors: Sequence[torch.Tensor], call: str) -> None:
    """Check torch's option `rootTensor`: the index of the root's tensor among the tensors that the root passes.

    Raises:
        InvalidArgumentError: `tensors` has no such index.
    """
    index = getattr(options, "rootTensor", 0)
    if not 0 <= index < len(tensors):
        raise InvalidArgumentError(f"{call}: expected rootTensor in 0..{len(tensors) - 1}, found {index}")


def time_limit_s(timeout: timedelta | None) -> float | None:
    """The time limit in seconds, or None for the group's limit, which torch writes as a timeout of None, zero or below."""
    if timeout is None or timeout.days < 0 or not timeout:
        return None
    return timeout.total_seconds()


def listed(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a call as a list. torch's groups take one tensor, or a list with one tensor for each device."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def some(tensors: Any, call: str) -> list[Any]:
    """The entries of a list that must not be empty.

    Raises:
        InvalidArgumentError: the list is empty.
    """
    entries = list(tensors)
    if not entries:
        raise InvalidArgumentError(f"{call}: expected at least one tensor, found an empty list")
    return entries


def only(tensors: Any, what: str) -> Any:
    """The only entry of a list that has one entry for each device of a process. We serve one device in each process.

    Raises:
        InvalidArgumentError: the list has more entries, or none.
    """
    if len(tensors) != 1:
        raise InvalidArgumentError(f"expected one {what}, for one device in each process, found {len(tensors)}")
    return tensors[0]
