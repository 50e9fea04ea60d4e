"""Do all ranks have the same parameters, and the same options?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from syncline.collectives import DisagreementError, ProcessGroup
from syncline.collectives.internal import all_gather_bytes

Description = dict[str, list[object]]


def verify_same_parameters(names: Sequence[str], parameters: Sequence[torch.Tensor], *, group: ProcessGroup) -> None:
    """Compare names, shapes, strides, dtypes and which are frozen over all ranks; every rank of the group calls it.

    Args:
        names: one for each parameter; appear in errors.
        parameters: in order of definition. A tensor that is no `torch.nn.Parameter` is called a buffer in errors.
        group: the ranks.

    Cost: an all-gather of 32 bytes; only if these differ, another of the descriptions.

    Raises:
        DisagreementError: on every rank alike; names the first parameter that differs, and both versions.
    """
    described = {name: _describe(parameter) for name, parameter in zip(names, parameters, strict=True)}
    versions = _versions_if_different(list(described.items()), group)
    if versions is not None:
        difference = _first_difference([dict(version) for version in versions])
        raise DisagreementError(f"the ranks do not have the same model ({group.place()}): {difference}")


def verify_same_options(options: Mapping[str, object], *, group: ProcessGroup) -> None:
    """Compare options by name over all ranks; every rank of the group calls it, with the same names.

    Args:
        options: names, as in the caller's signature, and values: numbers, strings, None, or sequences of these.
        group: the ranks.

    Cost: an all-gather of 32 bytes; only if these differ, another of the options.

    Raises:
        DisagreementError: on every rank alike; names the options that differ, and the values on both ranks.
    """
    versions = _versions_if_different(options, group) or [{}]
    rank, other = next(((rank, version) for rank, version in enumerate(versions) if version != versions[0]), (0, None))
    if other is None:  # 25 and 25.0 are the same
        return
    different = ", ".join(
        f"{name}={versions[0].get(name)!r} on rank 0 and {other.get(name)!r} on rank {rank}"
        for name in {**versions[0], **other}
        if versions[0].get(name) != other.get(name)
    )
    raise DisagreementError(
        f"expected the same options on every rank ({group.place()}), found {different}. Pass the same on every rank"
    )


def _versions_if_different(mine: object, group: ProcessGroup) -> list[Any] | None:
    """None if all ranks have the same; otherwise what each has, by rank, as JSON keeps it."""
    text = json.dumps(mine).encode()
    if len(set(all_gather_bytes(hashlib.sha256(text).digest(), group=group))) == 1:
        return None
    return [json.loads(version) for version in all_gather_bytes(text, group=group)]


def _describe(parameter: torch.Tensor) -> list[object]:
    is_parameter = isinstance(parameter, torch.nn.Parameter)
    return [
        "parameter" if is_parameter else "buffer",
        list(parameter.shape),
        list(parameter.stride()),
        str(parameter.dtype),
        is_parameter and not parameter.requires_grad,
    ]


def _first_difference(versions: Sequence[Description]) -> str:
    reference = versions[0]
    for rank, version in enumerate(versions):
        if version == reference and list(version) == list(reference):
            continue
        for name in [*reference, *(extra for extra in version if extra not in reference)]:
            ours, theirs = reference.get(name), version.get(name)
            if ours != theirs:
                return (
                    f"{(ours or theirs or ['?'])[0]} '{name}' is {_in_words(ours)} on rank 0 and {_in_words(theirs)} on "
                    f"rank {rank} ({len(reference)} and {len(version)} in all). Build the same model on every rank"
                )
        break
    return f"rank {rank} has the parameters of rank 0 in another order. Define the modules in the same order on every rank"


def _in_words(entry: list[object] | None) -> str:
    if entry is None:
        return "missing"
    _, shape, stride, dtype, is_frozen = entry
    return f"{str(dtype).removeprefix('torch.')}{shape} with strides {stride}{' (frozen)' if is_frozen else ''}"
