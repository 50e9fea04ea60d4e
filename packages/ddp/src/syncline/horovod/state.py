"""Give every rank the root's model, optimizer and objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from syncline.collectives import InvalidArgumentError, broadcast_coalesced, exchange_objects
from syncline.collectives import broadcast_object as object_of
from syncline.ddp.training_state import load_optimizer_state

from .collectives import _announce_complete, root_in
from .world import ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copy the root's tensors into the tensors of every rank.

    The tensors are sent in buffers of up to 250 MiB, at most two at a time. (A larger tensor has a buffer of its own.)

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or tensors. Names and shapes are the same on every rank. The
            function skips None. The function also skips the extra state of a module (`get_extra_state`) if this state is not a
            tensor.
        root_rank: the root's rank among all ranks.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: `params` has other objects, as `optimizer.state_dict()` has.
    """
    if isinstance(params, Mapping):
        # Sort by name, because the order of a dictionary may differ between ranks.
        entries = sorted(params.items())
    elif not isinstance(params, torch.Tensor) and hasattr(params, "__iter__"):
        entries = [each[:2] if isinstance(each, tuple) else ("", each) for each in params]
    else:
        raise InvalidArgumentError(
            f"expected a state_dict, named parameters or a list of tensors, found {type(params).__name__}"
        )
    tensors = [value for name, value in entries if not _is_extra_state(name, value)]
    for value in tensors:
        if not isinstance(value, torch.Tensor) and value is not None:
            raise InvalidArgumentError(
                f"expected tensors as params, found {type(value).__name__}; for an optimizer call "
                "hvd.broadcast_optimizer_state, for other objects call hvd.broadcast_object"
            )
    _announce_complete(process_set, "broadcast_parameters")
    group = process_set.group()
    dense = [value.detach() for value in tensors if isinstance(value, torch.Tensor)]
    if dense:
        broadcast_coalesced(dense, group=group, root=root_in(group, root_rank))


def _is_extra_state(name: object, value: object) -> bool:
    """Whether this entry of a module's `state_dict()` comes from `get_extra_state`, and is not a tensor."""
    return str(name).endswith("_extra_state") and not isinstance(value, torch.Tensor)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,  # noqa: ARG001 - not needed here
) -> None:
    """Give every rank the root's `optimizer.state_dict()`, including learning rates and other options.

    The optimizers of the other ranks may be new, without a state.

    Args:
        optimizer: an optimizer of torch, or a `DistributedOptimizer`.
        root_rank: the root's rank among all ranks.
        model: ignored.
    """
    _announce_complete(global_process_set, "broadcast_optimizer_state")
    group = global_process_set.group()
    is_root = group.rank == root_rank
    tensors: list[torch.Tensor] = []
    outline = _outlined(optimizer.state_dict(), tensors) if is_root else None
    outline = object_of(outline, root_rank, group)
    if not is_root:
        # The outline says which tensors follow, so this rank can make an empty tensor for each.
        tensors = []
        state = _filled(outline, tensors)
    if tensors:
        broadcast_coalesced(tensors, group=group, root=root_in(group, root_rank))
    if not is_root:
        load_optimizer_state(optimizer, state)


@dataclass(frozen=True)
class _Hole:
    """Stands for a tensor in an object that is sent without its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


def _outlined(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().contiguous())
        return _Hole(tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, Mapping):
        return {key: _outlined(each, tensors) for key, each in value.items()}
    # Do not look into classes derived from list or tuple, such as a namedtuple: their constructors take other arguments.
    if type(value) in (list, tuple):
        return type(value)(_outlined(each, tensors) for each in value)
    return value


def _filled(outline: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(outline, _Hole):
        device = outline.device_type if outline.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
        tensors.append(torch.empty(outline.shape, dtype=outline.dtype, device=device))
        return tensors[-1]
    if isinstance(outline, Mapping):
        return {key: _filled(each, tensors) for key, each in outline.items()}
    if type(outline) in (list, tuple):
        return type(outline)(_filled(each, tensors) for each in outline)
    return outline


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,  # noqa: ARG001 - matching is by order
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank. The object is sent as a pickle."""
    _announce_complete(process_set, "broadcast_object")
    group = process_set.group()
    received = object_of(obj, None, group, root_in(group, root_rank))
    # The root gets its own object, not a copy.
    return obj if group.ranks[group.rank] == root_rank else received


def allgather_object(
    obj: Any,
    name: str | None = None,  # noqa: ARG001 - matching is by order
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks. The objects are sent as pickles."""
    _announce_complete(process_set, "allgather_object")
    return exchange_objects(obj, group=process_set.group())
