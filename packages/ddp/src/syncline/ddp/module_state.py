"""List and check a module's parameters and buffers, and copy them from one rank to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.parameter import is_lazy

from syncline.collectives import MisuseError, ProcessGroup, broadcast_coalesced
from syncline.collectives.internal import overlaps_itself
from syncline.reducer import verify_same_parameters

from .torch_internals import BatchNorm, InstanceNorm

NamedParameters = list[tuple[str, torch.nn.Parameter]]

_NORMALIZATION = (BatchNorm, InstanceNorm)


class ModuleState:
    """The parameters and buffers of a module that all replicas have in common: all except the ignored ones.

    Args:
        module: the module.
        ignored: names of parameters and buffers that each rank keeps for itself.

    Attributes:
        module: the module with the parameters and buffers. The caller may assign another module.
    """

    def __init__(self, module: torch.nn.Module, ignored: frozenset[str] = frozenset()) -> None:
        self.module = module
        self._ignored = ignored

    def parameters(self) -> NamedParameters:
        """Return all parameters that are not ignored, with their names, each parameter once, in the order of definition.

        A parameter of several modules is in the result if one of its names is not ignored. If one module has several names,
        only the first name counts, as in torch.
        """
        if not self._ignored:  # the usual case
            return list(self.module.named_parameters())
        shared: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for prefix, part in self.module.named_modules():
            for name, parameter in part.named_parameters(prefix, recurse=False):
                if name not in self._ignored:
                    shared.setdefault(id(parameter), (name, parameter))
        return list(shared.values())

    def needs_gradients(self) -> bool:
        """Whether any parameter that is not ignored requires a gradient."""
        ignored = self.ignored_parameters()
        return any(parameter.requires_grad and id(parameter) not in ignored for parameter in self.module.parameters())

    def ignored_parameters(self) -> set[int]:
        """Return the `id`s of the parameters that `parameters` leaves out because of `ignored`."""
        if not self._ignored:  # the usual case
            return set()
        shared = {id(parameter) for _, parameter in self.parameters()}
        return {id(parameter) for parameter in self.module.parameters()} - shared

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return all buffers that are not ignored, with their names, each buffer once."""
        return [(name, b) for name, b in self.module.named_buffers() if name not in self._ignored]

    def normalization_layers(self) -> list[torch.nn.Module]:
        """Return the layers of batch and instance normalisation."""
        return [layer for layer in self.module.modules() if isinstance(layer, _NORMALIZATION)]

    def check(self, group: ProcessGroup, *, buffers: bool) -> None:
        """Check that the group can send all parameters (with `buffers` also buffers) between ranks. This is not a collective.

        Raises:
            MisuseError: a tensor is not initialised yet (lazy modules), is a DTensor, is sparse, is on a device that the
                group's backend cannot use, or has elements that share memory. Or a parameter that requires a gradient was made
                in inference mode. The text names the tensor.
        """
        for name, parameter in self.parameters():
            problem = _problem(parameter, group)
            # A frozen parameter may be expanded, because a broadcast writes each element once. An optimizer would write the
            # same element several times.
            if problem is None and parameter.requires_grad and _overlaps(parameter):
                problem = (
                    "has elements that share memory (such as `expand` makes), so no optimizer can write it; make it of "
                    "`tensor.clone()`"
                )
            if problem is None and parameter.requires_grad and parameter.is_inference():
                problem = (
                    "was made in torch.inference_mode(), so no optimizer can write it; make the model outside of that mode, "
                    "such as in torch.no_grad()"
                )
            if problem is not None:
                raise MisuseError(f"parameter '{name}' {problem}")
        for name, buffer in self.buffers() if buffers else []:
            problem = _problem(buffer, group)
            if problem is not None:
                raise MisuseError(f"buffer '{name}' {problem}")

    def trainable_parameters(self) -> NamedParameters:
        """Return the parameters that require a gradient and are not ignored, with their names.

        Raises:
            MisuseError: no parameter requires a gradient.
        """
        trainable = [(name, parameter) for name, parameter in self.parameters() if parameter.requires_grad]
        if not trainable:
            raise MisuseError(
                "no parameter of the module requires a gradient, so there is nothing to average: use the module without "
                "DistributedDataParallel, or unfreeze a parameter"
            )
        return trainable

    def sparse_parameters(self) -> set[int]:
        """Return the `id`s of the parameters with sparse gradients: the weights of embeddings with `sparse=True`."""
        embeddings = (m for m in self.module.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)))
        return {id(embedding.weight) for embedding in embeddings if embedding.sparse}

    def verify(self, group: ProcessGroup, *, buffers: bool) -> None:
        """Check that all ranks have tensors with the same names, shapes, strides and dtypes. This is a collective.

        Raises:
            DisagreementError: on all ranks, if the tensors differ between ranks, or if different parameters are frozen.
        """
        named: list[tuple[str, torch.Tensor]] = [*self.parameters(), *(self.buffers() if buffers else [])]
        verify_same_parameters([name for name, _ in named], [tensor for _, tensor in named], group=group)

    def broadcast(self, group: ProcessGroup, root: int, *, buffers: bool) -> None:
        """Copy the root's parameters, and with `buffers` also its buffers, to every rank. This is a collective."""
        named: list[tuple[str, torch.Tensor]] = [*self.parameters(), *(self.buffers() if buffers else [])]
        broadcast_tensors(named, group, root)


def broadcast_tensors(named: Sequence[tuple[str, torch.Tensor]], group: ProcessGroup, root: int) -> None:
    """Copy the root's tensors into the tensors of every rank. This is a collective."""
    broadcast_coalesced(writable(tensor for _, tensor in named), group=group, root=root)


def writable(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return detached views of the tensors, for writing. In each view, each element occurs once."""
    return [tensor.detach() if 0 not in tensor.stride() else tensor.detach()[first_of_each(tensor)] for tensor in tensors]


def put_buffer(holder: torch.nn.Module, name: str, tensor: torch.Tensor | None, *, persistent: bool) -> None:
    """Set the buffer of this name to a tensor or None. If the buffer exists, `persistent` has no effect."""
    if name in holder._buffers:
        setattr(holder, name, tensor)
        return
    if hasattr(holder, name):  # an attribute that is no buffer
        delattr(holder, name)
    holder.register_buffer(name, tensor, persistent)


def first_of_each(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return an index that selects each element of an expanded tensor only once."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())


def _problem(tensor: torch.Tensor, group: ProcessGroup) -> str | None:
    if is_lazy(tensor):
        return "is not initialised yet; run one forward of the bare module before it is wrapped"
    if hasattr(tensor, "placements"):  # an import of the class of DTensors would take long
        return (
            "is a DTensor (tensor parallelism makes DTensors), but only plain parameters can be averaged; use torch's own "
            "DistributedDataParallel over Syncline's groups, or fully_shard"
        )
    if tensor.device.type not in group.device_types:
        served = ", ".join(sorted(group.device_types))
        return (
            f"is on {tensor.device}, but backend '{group.backend_name}' moves tensors on {served}; move the module, or choose "
            "a backend for that device"
        )
    if tensor.layout is not torch.strided:
        return f"is sparse ({tensor.layout}), but only dense ones are kept equal; make it dense, or exclude it by name"
    if _overlaps(*writable([tensor])):
        return "has elements that share memory, so it cannot be written; make it of `tensor.clone()`"
    return None


def _overlaps(tensor: torch.Tensor) -> bool:
    return overlaps_itself(tensor.shape, tensor.stride())
