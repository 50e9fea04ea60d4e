"""A bucket's memory: one flat buffer, and in it one view for each parameter's gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.collectives import MisuseError, ProcessGroup


class Bucket:
    """Flat storage for the gradients of some parameters of one dtype and device.

    ::

        buffer   | view of fc.weight | view of fc.bias | view of conv.weight |     numel = the sum of theirs

    A view has the parameter's shape, and its strides where these are dense (a channels-last parameter has a channels-last
    view), so a gradient fits without a change of layout.

    Attributes:
        indices: the parameters' indices in the reducer.
        parameters: the parameters.
        buffer: flat, on the parameters' device; from `ProcessGroup.allocate`.
        views: one for each parameter.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: ProcessGroup,
    ) -> None:
        self.indices = list(indices)
        self.parameters = list(parameters)
        self._names = list(names)
        first = self.parameters[0]
        numel = sum(parameter.numel() for parameter in self.parameters)
        self.buffer = group.allocate(numel, first.dtype, first.device)
        self.views = self.views_into(self.buffer)

    def views_into(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """One view of a flat buffer for each parameter, shaped and strided like it."""
        views, start = [], 0
        for parameter in self.parameters:
            piece = buffer[start : start + parameter.numel()]
            views.append(_view_like(piece, parameter))
            start += parameter.numel()
        return views

    def collect(self) -> None:
        """Copy the parameters' gradients into the buffer, except those that already lie there."""
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for parameter, view, name in zip(self.parameters, self.views, self._names, strict=True):
            gradient = parameter.grad
            if gradient is view:
                continue
            sources.append(_dense_gradient(gradient, name))
            targets.append(view)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)

    def accept(self, result: object) -> None:
        """Take the reduced gradients, if they are not in the buffer already.

        Raises:
            MisuseError: a hook returned no tensor, or another number of elements than it was given.
        """
        if result is self.buffer:
            return
        if not isinstance(result, torch.Tensor):
            raise MisuseError(
                f"the communication hook returned a future of {type(result).__name__}; expected the reduced bucket, a tensor "
                f"of {self.buffer.numel()} elements"
            )
        if result.numel() != self.buffer.numel():
            raise MisuseError(
                f"the communication hook was given a bucket of {self.buffer.numel()} elements and returned "
                f"{result.numel()}; it must return the whole reduced bucket. Parameters in it: {', '.join(self._names)}"
            )
        with torch.no_grad():
            self.buffer.copy_(result.reshape(-1))

    def write_back(self) -> None:
        """Copy the buffer into the parameters' own gradients."""
        targets = [_own_gradient(parameter) for parameter in self.parameters]
        with torch.no_grad():
            torch._foreach_copy_(targets, self.views)

    def alias(self) -> None:
        """Make each parameter's gradient the view itself."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view


def _own_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:  # somebody took it away while backward ran
        parameter.grad = torch.empty_like(parameter)
    return parameter.grad


def _dense_gradient(gradient: torch.Tensor | None, name: str) -> torch.Tensor:
    if gradient is None or gradient.layout is not torch.strided:
        found = "none" if gradient is None else f"layout {gradient.layout}"
        raise MisuseError(
            f"expected a dense gradient for parameter '{name}', found {found}; sparse gradients are not reduced yet: "
            "use sparse=False in that module"
        )
    if gradient.requires_grad:
        raise MisuseError(
            f"the gradient of parameter '{name}' itself requires a gradient (backward with create_graph=True); the reduction "
            "is not differentiable. Use torch.autograd.grad for the inner derivative, and backward() for the outer one"
        )
    return gradient


def _view_like(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A view of a flat piece with the parameter's shape, and with its strides if they fill the piece exactly."""
    if _is_dense(parameter):
        return torch.as_strided(piece, parameter.shape, parameter.stride(), piece.storage_offset())
    return piece.view(parameter.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gap or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True
