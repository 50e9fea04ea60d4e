"""Find the tensors in the outputs of a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import torch

from syncline.collectives.internal import disable_dynamo

# Values in which there can be no tensor.
PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)


@disable_dynamo
def tensors_in(outputs: object) -> list[torch.Tensor]:
    """Return all tensors in nested lists, tuples, sets and mappings, and in the fields of dataclasses."""
    return [value for value in leaves(outputs) if isinstance(value, torch.Tensor)]


def leaves(outputs: object) -> Iterator[object]:
    """Yield each object that is not a container, and each only once. Objects of unknown types are not searched."""
    seen: dict[int, object] = {}  # holds the objects, because a new object may get the id of a freed object
    waiting = [outputs]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        members = _members(value)
        if members is None:
            yield value
        waiting += members or ()
        # A tensor may have attributes, too.
        if members is not None or isinstance(value, torch.Tensor):
            waiting += getattr(value, "__dict__", {}).values()


def _members(value: object) -> Iterable[object] | None:
    """Return the members of a container, or None if the object is no container."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None
