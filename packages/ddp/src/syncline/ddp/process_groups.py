"""Choose the group over which a wrapped module averages gradients."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch.distributed as dist

from syncline.collectives import (
    InvalidArgumentError,
    NonMember,
    ProcessGroup,
    as_process_group,
    get_default_group,
    init_process_group,
    is_initialized,
)

AnyGroup: TypeAlias = ProcessGroup | dist.ProcessGroup


def choose_group(process_group: object, device_mesh: Any = None) -> AnyGroup:
    """Return the group that one of the arguments names, or the default group if both arguments are None.

    Raises:
        InvalidArgumentError: both arguments were given, the mesh has several dimensions, or `process_group` is not a group.
        MisuseError: this rank is not in the group.
    """
    if device_mesh is not None:
        if process_group is not None:
            raise InvalidArgumentError("Cannot specify both process_group and device_mesh arguments. Leave one out")
        if device_mesh.ndim != 1:
            raise InvalidArgumentError(
                f"Only 1D device mesh is supported, found {device_mesh}: pass the slice over which gradients are averaged, "
                "such as device_mesh['data']"
            )
        process_group = device_mesh.get_group(mesh_dim=0)
    if process_group is None:
        return choose_default_group()
    if isinstance(process_group, ProcessGroup | dist.ProcessGroup):
        return process_group
    NonMember.refuse(process_group)
    raise InvalidArgumentError(
        f"expected a process group of syncline.collectives or of torch.distributed, found {type(process_group).__name__}"
        + (": this rank is not a member of that group" if process_group is dist.GroupMember.NON_GROUP_MEMBER else "")
    )


def as_ours(group: AnyGroup) -> ProcessGroup:
    """Return a group of Syncline for a group of Syncline or of torch.distributed.

    If a group of torch.distributed runs on a group of Syncline, the result is this inner group. For any other group of torch,
    the result is a wrapper.
    """
    return group if isinstance(group, ProcessGroup) else as_process_group(group)


def resolve_group(process_group: object) -> ProcessGroup:
    """Return a group of Syncline for the argument; see `choose_group` and `as_ours`."""
    return as_ours(choose_group(process_group))


def choose_default_group() -> AnyGroup:
    """Return Syncline's default group, or else torch's. If there is neither, make Syncline's default group."""
    if is_initialized():
        return get_default_group()
    if dist.is_available() and dist.is_initialized():
        world = dist.group.WORLD
        assert world is not None
        return world
    return init_process_group()


def has_default_group() -> bool:
    """Whether Syncline or torch has a default group."""
    return is_initialized() or (dist.is_available() and dist.is_initialized())


def is_default_group(group: AnyGroup, ours: ProcessGroup) -> bool:
    """Whether a group is the one that `choose_default_group` returns. `ours` is `as_ours(group)`."""
    if not has_default_group():
        return False
    # A script may pass the torch group that runs on Syncline's default group.
    default = choose_default_group()
    return group is default or ours is default
