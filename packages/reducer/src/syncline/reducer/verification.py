"""Check that all ranks have the same parameters and the same options."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from syncline.collectives import DisagreementError, MisuseError, ProcessGroup, SynclineError
from syncline.collectives.internal import all_gather_bytes, are_same_on_all_ranks, broadcast_object

logger = logging.getLogger("syncline.reducer")

Description = dict[str, list[object]]

# A rank that refuses its model sends this key with the reason, in place of its options or parameters.
_REFUSED = "refused"


class Difference(NamedTuple):
    """A difference between the parameters or options of two ranks.

    Attributes:
        rank: the first rank that differs from rank 0.
        reference: the value of rank 0, as read from JSON.
        found: the value of `rank`, as read from JSON.
    """

    rank: int
    reference: Any
    found: Any


def verify_same_parameters(names: Sequence[str], parameters: Sequence[torch.Tensor], *, group: ProcessGroup) -> None:
    """Check that all ranks have the same parameters in the same order: names, shapes, strides, dtypes, `requires_grad`.

    Every rank of the group calls this function.

    Args:
        names: the names, for errors and for the comparison.
        parameters: the parameters or buffers. A tensor that is not a `torch.nn.Parameter` counts as a buffer.
        group: the group whose ranks are compared.

    Cost: an all_reduce of 16 bytes. If ranks differ, also two broadcasts of a description, and all-gathers of a few bytes.

    Raises:
        DisagreementError: on every rank, if the parameters differ, or if a rank has failed in `telling_the_others`. The text
            describes the first different parameter, on rank 0 and on the first rank that differs from rank 0. Or it shows the
            error of the rank that has failed.
    """
    described = {name: _describe(parameter) for name, parameter in zip(names, parameters, strict=True)}
    difference = _find_difference(list(described.items()), group)
    if difference is not None:
        where = _first_difference(difference.rank, dict(difference.reference), dict(difference.found))
        raise DisagreementError(
            f"the ranks do not have the same model ({group.place()}); build the same model on every rank\n  {where}"
        )


def verify_same_options(options: Mapping[str, object], *, group: ProcessGroup) -> None:
    """Check that all ranks have the same options. Every rank of the group calls this function.

    Args:
        options: a value for each option's name: a number, a string, None, or a sequence of such values.
        group: the group whose ranks are compared.

    Cost: the cost of `verify_same_parameters`.

    Raises:
        DisagreementError: on every rank, if the options differ, or if a rank has failed in `telling_the_others`. The text shows
            the different values, or the error of that rank.
    """
    difference = _find_difference(options, group)
    if difference is None:
        return
    rank, reference, found = difference
    different = ", ".join(
        f"{name}={reference.get(name)!r} on rank 0 and {found.get(name)!r} on rank {rank}"
        for name in {**reference, **found}
        if reference.get(name) != found.get(name)
    )
    raise DisagreementError(
        f"expected the same options on every rank ({group.place()}), found {different}. Pass the same on every rank"
    )


@contextmanager
def telling_the_others(group: ProcessGroup) -> Iterator[None]:
    """A context for checks that may fail on some ranks only.

    After the `with` block, call `verify_same_options` or `verify_same_parameters` with the same group. If the checks raise a
    MisuseError on this rank, that call raises a DisagreementError on the other ranks, with the text of the MisuseError. Without
    this context, the other ranks would wait in that call for this rank.

    Raises:
        MisuseError: the error of the checks.
    """
    try:
        yield
    except MisuseError as error:
        if group.size > 1:
            logger.info("rank %d refuses its model, and tells the other ranks: %s", group.rank, error)
            with suppress(SynclineError):  # this rank's own error says more than a failed message to the others
                _find_difference({_REFUSED: str(error)}, group)
        raise


def _find_difference(mine: object, group: ProcessGroup) -> Difference | None:
    """A collective. Return the first difference between the ranks' values. None: all ranks have equal values.

    Raises:
        DisagreementError: one of the two ranks that differ has refused its model. The text shows the reason.
    """
    text = json.dumps(mine)
    if are_same_on_all_ranks(text.encode(), group=group):
        return None
    reference = json.loads(broadcast_object(text, 0, group=group))
    differs = all_gather_bytes(b"" if json.loads(text) == reference else b"x", group=group)
    # If no rank differs, the texts are different but the values are equal: 25 and 25.0.
    rank = next((rank for rank, said in enumerate(differs) if said), None)
    if rank is None:
        return None
    found = json.loads(broadcast_object(text, rank, group=group))
    # A rank that has refused its model sends its reason in place of the value, so the values cannot be compared.
    for its_rank, its in ((0, reference), (rank, found)):
        if _REFUSED in its:
            raise DisagreementError(f"rank {its_rank} has refused its model ({group.place()}): {its[_REFUSED]}")
    return Difference(rank, reference, found)


def _describe(parameter: torch.Tensor) -> list[object]:
    is_parameter = isinstance(parameter, torch.nn.Parameter)
    return [
        "parameter" if is_parameter else "buffer",
        list(parameter.shape),
        list(parameter.stride()),
        str(parameter.dtype),
        is_parameter and not parameter.requires_grad,
    ]


def _first_difference(rank: int, reference: Description, found: Description) -> str:
    for name in [*reference, *(extra for extra in found if extra not in reference)]:
        ours, theirs = reference.get(name), found.get(name)
        if ours != theirs:
            return (
                f"{(ours or theirs or ['?'])[0]} '{name}' is {_in_words(ours)} on rank 0 and {_in_words(theirs)} on "
                f"rank {rank} ({len(reference)} and {len(found)} in all)"
            )
    return f"rank {rank} has the parameters of rank 0 in another order. Define the modules in the same order on every rank"


def _in_words(entry: list[object] | None) -> str:
    if entry is None:
        return "missing"
    _, shape, stride, dtype, is_frozen = entry
    return f"{str(dtype).removeprefix('torch.')}{shape} with strides {stride}{' (frozen)' if is_frozen else ''}"
