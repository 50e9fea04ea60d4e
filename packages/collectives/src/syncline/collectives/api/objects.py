"""Collectives on Python objects, which are sent as pickles. Use these functions only between ranks that you trust."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidArgumentError
from ..group import ProcessGroup
from ..tensors.checks import is_list
from . import object_exchange
from .default_group import rank_in, resolve_group
from .object_exchange import broadcast_object


def exchange_objects(payload: Any, *, group: ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks as a list, in the order of the ranks. Objects are sent as pickles.

    Every rank of the group calls this function. `group=None` means the default group.

    Cost: two all-gathers: one of the lengths, and one of the pickles, padded to the longest pickle.
    """
    return object_exchange.exchange_objects(payload, group=resolve_group(group))


def all_gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    """Give every rank the objects of all ranks: rank r's object becomes `object_list[r]`. Objects are sent as pickles.

    Before the call, `object_list` must have as many entries as the group has ranks.
    """
    chosen = resolve_group(group)
    _check_list("all_gather_object", object_list, chosen)
    if len(object_list) != chosen.size:
        raise InvalidArgumentError(
            f"all_gather_object on {chosen.place()}: expected a list with {chosen.size} places, found {len(object_list)}"
        )
    object_list[:] = object_exchange.exchange_objects(obj, group=chosen)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    """Fill the `object_gather_list` of one rank, the root, with the objects of all ranks. Objects are sent as pickles.

    Only the root unpickles the objects. Other ranks pass None or an empty list. Pass the root as `dst` (a rank of the default
    group) or as `group_dst` (a rank of the group). The default is rank 0 of the group.
    """
    chosen = resolve_group(group)
    root = rank_in(chosen, dst, group_dst, default=0)
    is_root = chosen.rank == root
    if object_gather_list is not None:
        _check_list("gather_object", object_gather_list, chosen)
    # An empty list on a rank that is not the root counts as None, as in torch.
    is_given = object_gather_list is not None and (is_root or len(object_gather_list) > 0)
    if is_root != is_given:
        expected = "a list" if is_root else "None, for it is not the root"
        raise InvalidArgumentError(f"gather_object on {chosen.place()}: expected {expected} as object_gather_list")
    # Only the root unpickles the objects, because a class may exist only there.
    pickles = object_exchange.all_gather_bytes(pickle.dumps(obj), group=chosen)
    if object_gather_list is not None and is_root:
        object_gather_list[:] = [pickle.loads(entry) for entry in pickles]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """Overwrite the `object_list` of every rank with the list of one rank, the root. Objects are sent as pickles.

    All ranks pass lists of the same length. Pass the root as `src` (a rank of the default group) or as `group_src` (a rank of
    the group). The default is rank 0 of the group.
    """
    chosen = resolve_group(group)
    root = rank_in(chosen, src, group_src, default=0)
    _check_list("broadcast_object_list", object_list, chosen)
    received = broadcast_object(list(object_list), root, group=chosen)
    if len(received) != len(object_list):
        raise InvalidArgumentError(
            f"broadcast_object_list on {chosen.place()}: expected a list of {len(received)} places as on the root, "
            f"found {len(object_list)}"
        )
    object_list[:] = received


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """Send each rank one object of the root's input list: rank r gets entry r. Objects are sent as pickles.

    Each rank gets its object as `scatter_object_output_list[0]`. The root passes an input list with one entry for each rank.
    Other ranks pass None. Pass the root as `src` (a rank of the default group) or as `group_src` (a rank of the group). The
    default is rank 0 of the group.
    """
    chosen = resolve_group(group)
    root = rank_in(chosen, src, group_src, default=0)
    _check_list("scatter_object_list", scatter_object_output_list, chosen)
    if not scatter_object_output_list:
        raise InvalidArgumentError(f"scatter_object_list on {chosen.place()}: expected an output list with a place, found none")
    if scatter_object_input_list is not None:
        _check_list("scatter_object_list", scatter_object_input_list, chosen, is_filled=False)
    if chosen.rank == root and len(scatter_object_input_list or ()) != chosen.size:
        raise InvalidArgumentError(
            f"scatter_object_list on {chosen.place()}: expected {chosen.size} objects on the root, found "
            f"{len(scatter_object_input_list or ())}"
        )
    # Each entry is a separate pickle, so that each rank unpickles only the entry that it gets.
    entries = broadcast_object([pickle.dumps(entry) for entry in scatter_object_input_list or ()], root, group=chosen)
    scatter_object_output_list[0] = pickle.loads(entries[chosen.rank])


def _check_list(name: str, given: object, group: ProcessGroup, *, is_filled: bool = True) -> None:
    # A list that will be filled must accept any object.
    takes_objects = hasattr(given, "__setitem__") and not isinstance(given, deque | bytearray)
    if not is_list(given) or (is_filled and not takes_objects):
        raise InvalidArgumentError(f"{name} on {group.place()}: expected a list of objects, found {type(given).__name__}")
