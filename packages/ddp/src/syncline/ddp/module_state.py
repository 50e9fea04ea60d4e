"""A module's parameters and buffers: which there are, what is wrong with them, and how all ranks come to have rank 0's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

from syncline.collectives import MisuseError, ProcessGroup, broadcast_coalesced
from syncline.reducer import verify_same_parameters

NamedParameters = list[tuple[str, torch.nn.Parameter]]


def trainable_parameters(module: torch.nn.Module, group: ProcessGroup) -> NamedParameters:
    """The parameters that need a gradient, each once, by name, in order of definition.

    Raises:
        MisuseError: a parameter is not initialised yet (lazy modules), lies on a device that the group does not serve, or none
            needs a gradient.
    """
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise MisuseError(
                f"parameter '{name}' is not initialised yet; run one forward of the bare module before it is wrapped"
            )
        if parameter.device.type not in group.device_types:
            raise MisuseError(
                f"parameter '{name}' is on {parameter.device}, but backend '{group.backend_name}' moves tensors on "
                f"{', '.join(sorted(group.device_types))}; move the module, or choose a backend for that device"
            )
    trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not trainable:
        raise MisuseError(
            "no parameter of the module requires a gradient, so there is nothing to average: use the module without "
            "DistributedDataParallel, or unfreeze a parameter"
        )
    return trainable


def verify_state(module: torch.nn.Module, group: ProcessGroup) -> None:
    """Raise on every rank if the modules differ in any parameter or buffer: all of these are about to be broadcast."""
    state: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    verify_same_parameters(list(state), list(state.values()), group=group)


def broadcast_state(module: torch.nn.Module, group: ProcessGroup) -> None:
    """Give every rank the parameters and buffers of rank 0, in place. A collective."""
    broadcast_coalesced([*(parameter.detach() for parameter in module.parameters()), *_buffers(module)], group=group)


def broadcast_buffers(module: torch.nn.Module, group: ProcessGroup) -> None:
    """Give every rank the buffers of rank 0, in place. A collective."""
    broadcast_coalesced(_buffers(module), group=group)


def _buffers(module: torch.nn.Module) -> Sequence[torch.Tensor]:
    return [buffer.detach() for buffer in module.buffers()]
