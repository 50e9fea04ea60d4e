"""What a forward returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch


def tensors_in(outputs: object) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples, sets, mappings and dataclasses, however deep; what is in other objects is not found."""
    seen: set[int] = set()
    waiting = [outputs]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value
            continue
        members = _members(value)
        if members and id(value) not in seen:
            seen.add(id(value))
            waiting += members


def _members(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return []
