"""Find the tensors in the outputs of a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch

from syncline.collectives.internal import disable_dynamo


@disable_dynamo
def tensors_in(outputs: object) -> list[torch.Tensor]:
    """Return all tensors in nested lists, tuples, sets, mappings and dataclasses, and in the attributes of these objects."""
    tensors: list[torch.Tensor] = []
    seen: dict[int, object] = {}  # holds the objects, because a new object may get the id of a freed object
    waiting = [outputs]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            waiting += _attributes(value)
        else:
            waiting += _members(value)
    return tensors


def _members(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return [*value.values(), *_attributes(value)]
    if isinstance(value, list | tuple | set | frozenset):
        return [*value, *_attributes(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [*(getattr(value, field.name, None) for field in dataclasses.fields(value)), *_attributes(value)]
    return ()


def _attributes(value: object) -> Iterable[object]:
    return getattr(value, "__dict__", {}).values()
