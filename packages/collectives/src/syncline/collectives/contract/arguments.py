"""Tensors that are no memory of their own, as arguments of a collective: waited for, left alone, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..torch_internals import awaited_value, is_fake
from .reduce_op import PremulSum, ReduceOp

# What nearly all arguments are, which need no further look.
_USUAL = frozenset({torch.Tensor, torch.nn.Parameter, ReduceOp, PremulSum, int, bool, str, type(None)})


def are_usual(values: Iterable[object]) -> bool:
    """Whether a quick look shows that there is nothing to wait for, to leave alone or to refuse in the arguments of a call."""
    for value in values:
        kind = type(value)
        if kind in _USUAL:
            continue
        if kind is not list and kind is not tuple:
            return False
        for entry in value:  # type: ignore[attr-defined]  # it is a list or a tuple
            if type(entry) not in _USUAL:
                return False
    return True


def resolved(value: Any) -> Any:
    """An argument, or a list of such, with the tensors that a collective can use.

    Note [Tensors that are no memory]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A tensor of a class that overrides `__torch_dispatch__` stands for something else, and its own memory is not there.

    1. An `AsyncCollectiveTensor`, the result of a functional collective of torch's, stands for the tensor that the collective
       writes. Here it is waited for, and replaced by that tensor.
    2. A `FakeTensor` stands for a tensor that does not exist: somebody asks for shapes. The call ends at once, and
       communicates nothing, as nobody knows whether the other ranks ask as well (see `recorded`).
    3. Another one, such as a `DTensor` or a `MaskedTensor`, is refused by its name in `checks.no_memory`; so are tensors
       inside transformations of `torch.func`, and those whose memory was freed.
    """
    if isinstance(value, list | tuple):
        return [resolved(entry) for entry in value]
    awaited = awaited_value(value)
    return value if awaited is None else resolved(awaited)


def has_fakes(values: Sequence[object]) -> bool:
    """Whether a tensor among the arguments, or in their lists, is one that does not exist."""
    return any(has_fakes(value) if isinstance(value, list | tuple) else is_fake(value) for value in values)
