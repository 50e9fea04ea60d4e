"""What a forward returns."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping

import torch

from syncline.collectives.internal import disable_dynamo

# Nothing with a graph is in these.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)


@disable_dynamo
def tensors_in(outputs: object) -> list[torch.Tensor]:
    """The tensors in lists, tuples, sets, mappings and dataclasses, however deep."""
    return look_into(outputs)[0]


@disable_dynamo
def look_into(outputs: object) -> tuple[list[torch.Tensor], bool]:
    """The same, and whether these are all: nobody knows what is in other objects, numbers and text apart."""
    if type(outputs) is torch.Tensor and not outputs.__dict__:
        return [outputs], True
    tensors: list[torch.Tensor] = []
    are_all = True
    seen: dict[int, object] = {}  # held, or another object may have its place
    waiting = [outputs]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            waiting += _attributes(value)
        elif (members := _members(value)) is not None:
            waiting += members
        else:
            are_all = False
    return tensors, are_all


def _members(value: object) -> Iterable[object] | None:
    if isinstance(value, Mapping):
        return [*value.values(), *_attributes(value)]
    if isinstance(value, list | tuple | set | frozenset):
        return [*value, *_attributes(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [*(getattr(value, field.name, None) for field in dataclasses.fields(value)), *_attributes(value)]
    return None


def _attributes(value: object) -> Iterable[object]:
    """What somebody's own container, or somebody, has put there besides."""
    return getattr(value, "__dict__", {}).values()
