"""A bucket stores gradients in one flat buffer."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import repeat
from typing import NamedTuple, cast

import torch

from syncline.collectives import ProcessGroup
from syncline.collectives.internal import copy_each

from . import error_messages
from .differentiable_gradients import averaged, warn_of_graph
from .gradient_aliasing import GradientAliasing
from .torch_internals import foreach_copy, foreach_zero

_dtype_of = operator.attrgetter("dtype")
_requires_grad_of = operator.attrgetter("requires_grad")
_grad_of = operator.attrgetter("grad")
_address_of = torch.Tensor.data_ptr


class Layout(NamedTuple):
    """The shape and the strides of a view for the gradient of a parameter.

    The strides are the parameter's strides. If the parameter has gaps or overlaps in memory, the view is contiguous.
    """

    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Layout:
        """Return the layout for a parameter as it is now."""
        strides = parameter.stride() if _is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
        return cls(parameter.shape, strides)


class Bucket:
    """Flat memory for the gradients of some parameters. All these parameters have the same dtype and the same device.

    ::

        buffer   | view of fc.weight | view of fc.bias | view of conv.weight |     numel = the sum of the views' numels

    A view has the shape of its parameter. If the parameter's elements fill their memory without gaps (as in channels-last
    order), the view also has the parameter's strides. The view keeps these strides even if the parameter gets other strides
    later. An element must be at the same place of the buffer on all ranks, so the constructor's `layouts` must be the layouts
    that the ranks have compared.

    Attributes:
        indices: the parameters' indices in the reducer.
        parameters: the parameters.
        names: the parameters' names, for errors.
        buffer: the flat buffer, on the parameters' device, from `group.allocate`.
        views: one view for each parameter. With `as_view` (the user's `gradient_as_bucket_view`), the views are the gradients.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        layouts: Sequence[Layout],
        group: ProcessGroup,
        *,
        as_view: bool = False,
    ) -> None:
        self.indices = list(indices)
        self.parameters = list(parameters)
        self.names = list(names)
        self._layouts = list(layouts)
        self._place = group.place()
        self._world_size = group.size
        self._as_view = as_view
        self._has_graph = False  # whether some gradients of this backward are part of a graph: `create_graph=True`
        self._kept: dict[int, torch.Tensor] = {}
        first = self.parameters[0]
        numel = sum(layout.shape.numel() for layout in self._layouts)
        self.buffer = group.allocate(numel, first.dtype, first.device)
        self.views = self.views_into(self.buffer)
        self._own_memory = self.buffer, self.views
        self._addresses = list(map(_address_of, self.views))
        self._aliasing = None if as_view else GradientAliasing(self.parameters, self.views)
        # `torch.cat` can fill a flat buffer only from vectors (biases and norms). For many small vectors, `torch.cat` needs a
        # third of the time of single copies.
        self._holds_vectors = all(parameter.dim() == 1 for parameter in self.parameters)

    def views_into(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return one view of a flat buffer for each parameter, as in `views`."""
        step = buffer.stride(0)  # a user's hook may set a buffer with gaps
        views, start = [], 0
        for layout in self._layouts:
            end = start + layout.shape.numel()
            piece = buffer[start:end]
            strides = layout.strides if step == 1 else [step * stride for stride in layout.strides]
            views.append(torch.as_strided(piece, layout.shape, strides, piece.storage_offset()))
            start = end
        return views

    @property
    def nbytes(self) -> int:
        """The number of bytes that are reduced."""
        return self.buffer.nbytes

    # ---- before the reduction ----

    def collect(self, unused: Collection[int] = ()) -> None:
        """Copy the parameters' gradients into the buffer. Gradients that are already in the buffer are not copied.

        A gradient that is None counts as zeros. `unused` has the indices of parameters that this rank does not use in this
        backward.

        Raises:
            MisuseError: a gradient has another dtype, layout or shape than its parameter had when the bucket was built.
        """
        self._choose_memory()
        self._has_graph = False
        gradients = list(map(_grad_of, self.parameters))
        in_place = self._positions_in_place(gradients)
        # The reduction overwrites the buffer, so keep a copy of each gradient that must stay if no rank uses its parameter.
        for position in in_place:
            if self.indices[position] in unused:
                self._keep(position)
        # Usually all gradients exist and no gradient is in the buffer. Then `_copy` copies all of them at once.
        if in_place or _some_are_none(gradients):
            self._copy_some(gradients, frozenset(in_place))
        else:
            self._copy(self.views, cast("list[torch.Tensor]", gradients))
        # Make each view the gradient of its parameter, unless the parameter is unused or its gradient is part of a graph.
        if self._as_view:
            self._set_views(gradients, {*unused, *self._differentiable(gradients)} if self._has_graph else unused)

    def collect_nothing(self) -> None:
        """Fill the buffer with zeros, because this rank takes part without gradients.

        Later, call `deliver` with all indices as `untouched`, so that this rank's gradients stay unchanged.
        """
        self._choose_memory()
        for position in self._positions_in_place(list(map(_grad_of, self.parameters))):
            self._keep(position)
        self.buffer.zero_()

    def _choose_memory(self) -> None:
        # See Note [Aliased gradients] in `gradient_aliasing`.
        if self._aliasing is None:
            # The user has given a gradient other memory: `gradient.data = ...`.
            if list(map(_address_of, self.views)) != self._addresses:
                self.views = self.views_into(self.buffer)
            return
        if self._aliasing.is_memory_free():
            self.buffer, self.views = self._own_memory
        # Other code still uses the bucket's own memory, so allocate other memory, unless the bucket has other memory already.
        elif self._is_in_own_memory:
            with torch.inference_mode(False):
                self.buffer = torch.zeros_like(self.buffer)
                self.views = self.views_into(self.buffer)

    @property
    def _is_in_own_memory(self) -> bool:
        return self.buffer is self._own_memory[0]

    def _positions_in_place(self, gradients: list[torch.Tensor | None]) -> list[int]:
        """Return the positions of the gradients that already have their place in the buffer, so that no copy is necessary.

        If a gradient is at a wrong place of the buffer, replace it by a copy in the list `gradients`.
        """
        if self._aliasing is not None:
            return self._aliasing.in_place(gradients) if self._is_in_own_memory else []
        in_place = []
        for position in self._positions_in_buffer(gradients):
            gradient = gradients[position]
            assert gradient is not None
            if _is_as_good_as(gradient, self.views[position]):
                in_place.append(position)
            else:  # for example, two parameters have exchanged their gradients
                gradients[position] = gradient.clone()
        return in_place

    def _positions_in_buffer(self, gradients: Sequence[torch.Tensor | None]) -> list[int]:
        addresses = _addresses_of(gradients)
        start, end = self.buffer.data_ptr(), self.buffer.data_ptr() + self.buffer.nbytes
        if max(addresses) < start or min(addresses) >= end:  # the usual case: backward has made new gradients
            return []
        return [position for position, address in enumerate(addresses) if start <= address < end]

    def _keep(self, position: int) -> None:
        self._kept[self.indices[position]] = self.views[position].clone()

    def _copy_some(self, gradients: Sequence[torch.Tensor | None], in_place: Collection[int]) -> None:
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        absent: list[torch.Tensor] = []
        for position, (gradient, view) in enumerate(zip(gradients, self.views, strict=True)):
            if gradient is None:
                absent.append(view)
            elif position not in in_place:
                sources.append(gradient)
                targets.append(view)
        if sources:
            self._copy(targets, sources)
        if absent:
            with torch.no_grad():
                foreach_zero(absent)

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        # `copy_` silently converts dtypes, and expands gradients with too few rows. So check dtypes and sizes before the copy.
        # Look for other mistakes only when the copy fails.
        numel = sum(map(torch.Tensor.numel, sources))
        expected = self.buffer.numel() if targets is self.views else sum(map(torch.Tensor.numel, targets))
        if set(map(_dtype_of, sources)) != {self.buffer.dtype} or numel != expected:
            self._refuse_gradients()
        if any(map(_requires_grad_of, sources)):
            self._has_graph = True
            warn_of_graph()
        with torch.inference_mode():  # skips autograd, and is a sixth faster than `no_grad` for small gradients
            if self._holds_vectors and numel == self.buffer.numel():
                with suppress(RuntimeError):  # raised if a gradient lies in the buffer
                    torch.cat(sources, out=self.buffer)
                    return
            try:
                foreach_copy(targets, sources)
            except RuntimeError:
                # If a gradient is the cause, `_refuse_gradients` raises an error that says so. If not, raise torch's error.
                self._refuse_gradients()
                raise

    def _refuse_gradients(self) -> None:
        for parameter, name, view in zip(self.parameters, self.names, self.views, strict=True):
            gradient = parameter.grad
            if gradient is not None:
                error_messages.check_gradient(name, parameter, gradient, self.buffer.dtype, self._place)
                error_messages.check_shape(name, gradient, view.shape, self._place)

    # ---- after the reduction ----

    def release_gradients(self) -> None:
        """If gradients are in the bucket's memory, move them into new memory. With `as_view`, do nothing."""
        if self._aliasing is not None:
            self._aliasing.move_out()

    def accept(self, result: object) -> None:
        """Copy the reduced gradients into the buffer, unless they are already in the buffer.

        Raises:
            MisuseError: a hook's result is not a tensor, or differs from the hook's input in number of elements, dtype, layout
                or device.
        """
        # The usual case: the collective has reduced in place.
        if result is self.buffer:
            return
        error = error_messages.not_the_reduced_bucket(result, self.buffer, self.names)
        if error is not None:
            raise error
        assert isinstance(result, torch.Tensor)
        with torch.no_grad():
            self.buffer.copy_(result.reshape(-1))

    def deliver(self, untouched: Collection[int] = (), *, may_alias: bool = True) -> None:
        """Give the parameters their reduced gradients.

        Args:
            untouched: indices of parameters whose gradients stay unchanged.
            may_alias: whether large gradients may stay in the bucket's memory (see `GradientAliasing`). Pass False if other
                code, such as a hook, may use this memory later.
        """
        gradients = list(map(_grad_of, self.parameters))
        done = {*untouched, *self._deliver_into_graph(gradients, untouched)} if self._has_graph else untouched
        if self._as_view:
            self._set_views(gradients, done)
        else:
            self._copy_out(gradients, done, may_alias=may_alias)
        self._restore(untouched)

    def _differentiable(self, gradients: Sequence[torch.Tensor | None]) -> set[int]:
        found = zip(self.indices, gradients, strict=True)
        return {index for index, gradient in found if gradient is not None and gradient.requires_grad}

    def _deliver_into_graph(self, gradients: Sequence[torch.Tensor | None], untouched: Collection[int]) -> set[int]:
        chosen = self._differentiable(gradients).difference(untouched)
        for index, parameter, gradient, view in zip(self.indices, self.parameters, gradients, self.views, strict=True):
            if index in chosen:
                assert gradient is not None
                parameter.grad = averaged(gradient, view, self._world_size)
        return chosen

    def _set_views(self, gradients: Sequence[torch.Tensor | None], untouched: Collection[int]) -> None:
        # The usual case after the first backward: nothing to do.
        if all(map(operator.is_, gradients, self.views)):
            return
        try:
            for index, parameter, gradient, view in zip(self.indices, self.parameters, gradients, self.views, strict=True):
                if gradient is not view and index not in untouched:
                    set_view(parameter, view)
        except RuntimeError:  # the parameter was converted to another dtype or device
            self._refuse_gradients()
            raise

    def _copy_out(self, gradients: list[torch.Tensor | None], untouched: Collection[int], *, may_alias: bool) -> None:
        done = {position for position, index in enumerate(self.indices) if index in untouched} if untouched else set()
        # Only the bucket's own memory has aliases.
        if self._aliasing is not None and self._is_in_own_memory:
            done.update(self._aliasing.move(gradients, done) if may_alias else self._aliasing.in_place(gradients))
        with torch.inference_mode():  # as in `_copy`
            # The usual case: every parameter has a gradient, and all are copied by one call.
            if not done:
                with suppress(TypeError):  # raised for None, before anything is copied
                    copy_each(self.views, cast("list[torch.Tensor]", gradients))
                    return
        targets, sources = [], []
        for position, (parameter, gradient, view) in enumerate(zip(self.parameters, gradients, self.views, strict=True)):
            # Make a gradient if there is none: only other ranks use the parameter, or other code has dropped the gradient.
            if position not in done:
                targets.append(_new_gradient(parameter) if gradient is None else gradient)
                sources.append(view)
        if targets:
            with torch.inference_mode():
                copy_each(sources, targets)

    def _restore(self, untouched: Collection[int]) -> None:
        if not self._kept:
            return
        kept, self._kept = self._kept, {}
        with torch.no_grad():
            for index, view in zip(self.indices, self.views, strict=True):
                # If another rank uses the parameter (it is not `untouched`), its gradient has the reduced value already.
                if index in untouched and index in kept:
                    view.copy_(kept[index])


def _addresses_of(gradients: Sequence[torch.Tensor | None]) -> list[int]:
    try:
        return list(map(_address_of, cast("list[torch.Tensor]", gradients)))
    except (TypeError, RuntimeError):  # a gradient is None, or sparse
        return [
            gradient.data_ptr() if type(gradient) is torch.Tensor and gradient.layout is torch.strided else 0
            for gradient in gradients
        ]


def _is_as_good_as(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    return gradient is view or (
        (gradient.data_ptr(), gradient.shape, gradient.stride()) == (view.data_ptr(), view.shape, view.stride())
        and gradient.dtype is view.dtype
        and not gradient.is_conj()
        and not gradient.is_neg()
    )


def _some_are_none(gradients: Sequence[torch.Tensor | None]) -> bool:
    return any(map(operator.is_, gradients, repeat(None)))


def set_view(parameter: torch.nn.Parameter, view: torch.Tensor) -> None:
    """Set the parameter's gradient to a view of a bucket, or to a copy of the view if the parameter now has other strides.

    The strides must be equal, because fused optimizers pair the elements of parameters and gradients in the order of memory.
    """
    if parameter.stride() == view.stride() or Layout.of(parameter).strides == view.stride():
        parameter.grad = view
    else:
        with torch.no_grad():
            _new_gradient(parameter).copy_(view)


def _new_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    parameter.grad = torch.empty_like(parameter)
    return parameter.grad


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps and overlaps, in any order of dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        # The stride of a dimension of length 1 means nothing.
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True
