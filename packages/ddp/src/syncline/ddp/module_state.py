"""A module's parameters and buffers: which there are, what is wrong with them, and how all ranks come to have one rank's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

from syncline.collectives import MisuseError, ProcessGroup, broadcast_coalesced
from syncline.reducer import verify_same_parameters

NamedParameters = list[tuple[str, torch.nn.Parameter]]


class ModuleState:
    """The parameters and buffers of a module that its replicas share: all, but those to ignore.

    Args:
        module: the module.
        ignored: names of parameters and buffers that each rank keeps to itself.

    Attributes:
        module: the same; may be replaced.
    """

    def __init__(self, module: torch.nn.Module, ignored: frozenset[str] = frozenset()) -> None:
        self.module = module
        self._ignored = ignored

    def parameters(self) -> NamedParameters:
        """All parameters, each once, by name, in order of definition."""
        return [(name, p) for name, p in self.module.named_parameters() if name not in self._ignored]

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """All buffers, each once, by name."""
        return [(name, b) for name, b in self.module.named_buffers() if name not in self._ignored]

    def check(self, group: ProcessGroup) -> None:
        """Raise if the group cannot average some of the parameters.

        Raises:
            MisuseError: a parameter is not initialised yet (lazy modules), or lies on a device that the group does not serve.
        """
        for name, parameter in self.parameters():
            if is_lazy(parameter):
                raise MisuseError(
                    f"parameter '{name}' is not initialised yet; run one forward of the bare module before it is wrapped"
                )
            if parameter.device.type not in group.device_types:
                raise MisuseError(
                    f"parameter '{name}' is on {parameter.device}, but backend '{group.backend_name}' moves tensors on "
                    f"{', '.join(sorted(group.device_types))}; move the module, or choose a backend for that device"
                )

    def trainable_parameters(self, group: ProcessGroup) -> NamedParameters:
        """The parameters that need a gradient.

        Raises:
            MisuseError: as `check`; or none needs a gradient.
        """
        self.check(group)
        trainable = [(name, parameter) for name, parameter in self.parameters() if parameter.requires_grad]
        if not trainable:
            raise MisuseError(
                "no parameter of the module requires a gradient, so there is nothing to average: use the module without "
                "DistributedDataParallel, or unfreeze a parameter"
            )
        return trainable

    def sparse_parameters(self) -> set[int]:
        """The `id`s of the parameters whose gradients are sparse: those of embeddings that say so."""
        embeddings = (m for m in self.module.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)))
        return {id(embedding.weight) for embedding in embeddings if embedding.sparse}

    def verify(self, group: ProcessGroup, *, buffers: bool) -> None:
        """Raise on every rank if the modules differ in any parameter, or buffer: what is about to be broadcast."""
        named: list[tuple[str, torch.Tensor]] = [*self.parameters(), *(self.buffers() if buffers else [])]
        verify_same_parameters([name for name, _ in named], [tensor for _, tensor in named], group=group)

    def broadcast(self, group: ProcessGroup, root: int, *, buffers: bool) -> None:
        """Give every rank the parameters, and buffers, of the root, in place. A collective."""
        named: list[tuple[str, torch.Tensor]] = [*self.parameters(), *(self.buffers() if buffers else [])]
        broadcast_tensors(named, group, root)


def broadcast_tensors(named: Sequence[tuple[str, torch.Tensor]], group: ProcessGroup, root: int) -> None:
    """Give every rank the root's tensors, in place. A collective."""
    broadcast_coalesced([tensor.detach() for _, tensor in named], group=group, root=root)
