"""A bucket's memory: one flat buffer, and in it one view for each parameter's gradient."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import repeat
from typing import cast

import torch

from syncline.collectives import ProcessGroup

from . import complaints
from .lateness import LatenessGuard
from .lending import Lending
from .newness import Newness

_dtype_of = operator.attrgetter("dtype")


class Bucket:
    """Flat storage for the gradients of some parameters of one dtype and device.

    ::

        buffer   | view of fc.weight | view of fc.bias | view of conv.weight |     numel = the sum of theirs

    A view has the parameter's shape, and its strides where these are dense (a channels-last parameter has a channels-last
    view), so a gradient fits without a change of layout.

    Args:
        indices: the parameters' indices in the reducer.
        parameters: of one dtype and device.
        names: theirs, for errors.
        group: allocates the memory.
        as_view: let the parameters' gradients be the views, instead of copying there and back.

    Attributes:
        indices: the parameters' indices in the reducer.
        parameters: the parameters.
        names: theirs.
        buffer: flat, on the parameters' device; from `ProcessGroup.allocate`.
        views: one for each parameter.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: ProcessGroup,
        *,
        as_view: bool = False,
    ) -> None:
        self.indices = list(indices)
        self.parameters = list(parameters)
        self.names = list(names)
        self._place = group.place()
        self._as_view = as_view
        self._kept: dict[int, torch.Tensor] = {}
        self._seen: list[torch.Tensor | None] | None = None
        self._seen_are_new = False
        self._newness = Newness(self.parameters[0].dtype)
        self._guard: LatenessGuard | None = None
        first = self.parameters[0]
        numel = sum(parameter.numel() for parameter in self.parameters)
        self.buffer = group.allocate(numel, first.dtype, first.device)
        self.views = self.views_into(self.buffer)
        self._own_memory = self.buffer, self.views
        self._lending = None if as_view else Lending.of(self.indices, self.parameters, self.views)
        # Biases and norms: to concatenate many small vectors costs a third of copying each (and nothing else can be so joined).
        self._holds_vectors = all(parameter.dim() == 1 for parameter in self.parameters)

    def views_into(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """One view of a flat buffer for each parameter, shaped and strided like it."""
        views, start = [], 0
        for parameter in self.parameters:
            piece = buffer[start : start + parameter.numel()]
            views.append(_view_like(piece, parameter))
            start += parameter.numel()
        return views

    @property
    def nbytes(self) -> int:
        """Bytes that are reduced."""
        return self.buffer.nbytes

    def look(self) -> list[torch.Tensor | None]:
        """The parameters' gradients, which `collect` will take, if it comes before `forget_seen`.

        To read them takes as long as to copy them, if they are small: Python has an object made for each.
        """
        self._seen, self._seen_are_new = [parameter.grad for parameter in self.parameters], False
        return self._seen

    def learn_new(self) -> bool:
        """What was seen has come after forward, as far as it is there; returns whether `sees_new` will tell others like it.

        Not where gradients are lent: those have not been written to. And not where a parameter takes a gradient of any dtype
        (`grad_dtype` is None), so that it would not refuse a view of another one.
        """
        assert self._seen is not None, "look() comes first"
        if any(getattr(parameter, "grad_dtype", parameter.dtype) is None for parameter in self.parameters):
            return False
        self._seen_are_new = self._lending is None and self._newness.learn(self._seen, self._delivered_views)
        return self._seen_are_new

    def sees_new(self) -> bool:
        """Whether it has seen a gradient of every parameter, all new; see Note [Gradients that are new]."""
        assert self._seen is not None, "look() comes first"
        self._seen_are_new = self._newness.shows(self._seen, self._delivered_views)
        return self._seen_are_new

    def has_new(self, index: int) -> bool:
        """The same of one parameter, as it is now."""
        position = self.indices.index(index)
        return self._newness.shows_one(position, self.parameters[position].grad, self._delivered_views)

    @property
    def _delivered_views(self) -> list[torch.Tensor] | None:
        return self.views if self._as_view else None

    def forget_seen(self) -> None:
        """Forget what was seen."""
        self._seen, self._seen_are_new = None, False

    def collect(self, unused: Collection[int] = ()) -> None:
        """Copy the parameters' gradients into the buffer, except those that already lie there.

        Args:
            unused: indices of parameters that this rank does not use in this backward. If nobody does, their gradients
                shall stay as they are: `deliver` sees to it. Here they are worth what they hold, and zero if they are None.
        """
        self._find_free_memory()
        gradients = self.look() if self._seen is None else self._seen
        are_new = self._seen_are_new
        self.forget_seen()
        if not are_new and self._are_views(gradients):  # with `as_view`, if gradients are kept between backwards
            if unused:
                self._kept.update((index, view.clone()) for index, _, view in self._members() if index in unused)
        else:
            if are_new:
                self._copy(self.views, cast("list[torch.Tensor]", gradients))
            else:
                self._collect_some(gradients, unused)
            if self._as_view:
                try:
                    self.alias(unused)
                except RuntimeError:
                    self._complain()
                    raise
        if self._guard is not None:
            if self._as_view:
                collected = [parameter.grad for parameter in self.parameters] if unused else self.views
                self._guard.collected(collected, self.views[0])
            else:
                self._guard.collected(gradients, versions=self._newness.versions if are_new else ())

    def _collect_some(self, gradients: Sequence[torch.Tensor | None], unused: Collection[int]) -> None:
        """Whatever they are: some may be None, or lie in the buffer already."""
        if not (any(map(operator.is_, gradients, self.views)) or some_are_none(gradients)):
            self._check_and_copy(self.views, cast("list[torch.Tensor]", gradients))
            return
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        absent: list[torch.Tensor] = []
        for index, gradient, view in zip(self.indices, gradients, self.views, strict=True):
            if gradient is view:
                if index in unused:
                    self._kept[index] = view.clone()
            elif gradient is None:
                absent.append(view)
            else:
                sources.append(gradient)
                targets.append(view)
        if targets:
            self._check_and_copy(targets, sources)
        if absent:
            with torch.no_grad():
                torch._foreach_zero_(absent)

    def collect_nothing(self) -> None:
        """Fill the buffer with zeros, on a rank that has no gradients; `deliver` must leave all of them as they are."""
        self._find_free_memory()
        for index, parameter, view in self._members():
            if parameter.grad is view:
                self._kept[index] = view.clone()
        self.buffer.zero_()

    def accept(self, result: object) -> None:
        """Take the reduced gradients, if they are not in the buffer already.

        Raises:
            MisuseError: a hook returned no tensor, or another number of elements, dtype or device than it was given.
        """
        if result is self.buffer:
            return
        complaint = complaints.not_the_reduced_bucket(result, self.buffer, self.names)
        if complaint is not None:
            raise complaint
        assert isinstance(result, torch.Tensor)
        with torch.no_grad():
            self.buffer.copy_(result.reshape(-1))

    def deliver(self, untouched: Collection[int] = (), *, may_lend: bool = True) -> None:
        """Give the parameters their reduced gradients.

        Args:
            untouched: those, by index, whose gradients shall stay as they are.
            may_lend: whether large ones may lie in the bucket's memory, because nobody else knows of it.

        Raises:
            MisuseError: a gradient came late; see `detect_late_gradients`.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        if self._guard is not None:
            self._guard.check_places(gradients)
        if not self._as_view:
            self._write_back(gradients, untouched, may_lend=may_lend)
            return
        if not self._are_views(gradients):
            self.alias(untouched)
        self._restore(untouched)

    def _find_free_memory(self) -> None:
        """Do not overwrite what was lent."""
        if self._lending is None:
            return
        if self._lending.take_back():
            self.buffer, self.views = self._own_memory
        elif self.buffer is self._own_memory[0]:
            with torch.inference_mode(False):
                self.buffer = torch.zeros_like(self.buffer)
                self.views = self.views_into(self.buffer)

    def _write_back(self, gradients: list[torch.Tensor | None], untouched: Collection[int], *, may_lend: bool) -> None:
        lent = self._lending.lend(gradients, untouched) if may_lend and self._lending is not None else frozenset()
        with torch.inference_mode():  # as in `_copy`
            if not (untouched or lent):
                with suppress(TypeError):  # it refuses None, before it copies anything
                    torch._foreach_copy_(cast("list[torch.Tensor]", gradients), self.views)
                    return
        targets, sources = [], []
        for (index, parameter, view), gradient in zip(self._members(), gradients, strict=True):
            if index not in untouched and index not in lent:
                targets.append(_new_gradient(parameter) if gradient is None else gradient)
                sources.append(view)
        if targets:
            with torch.inference_mode():
                torch._foreach_copy_(targets, sources)

    def detect_late_gradients(self, advice: str) -> None:
        """From now on those that come when the reduction was issued already, which is when `remember` is called, are errors.

        To be called while no gradient is a view.

        Args:
            advice: for the error.
        """
        self._guard = LatenessGuard(self.names, self._place, advice)
        if self._as_view:
            # They share a version, which what is done to the buffer does not change, but what is done to any of them does.
            self.views = self.views_into(self.buffer.data)

    def ignore_late_gradients(self) -> None:
        """Somebody else sees to them from now on."""
        self._guard = None

    def remember(self, *, by_hook: bool) -> None:
        """The reduction was issued; `by_hook`: by a communication hook, which may give the parameters other gradients."""
        if self._guard is not None:
            self._guard.remember(may_be_replaced=by_hook)

    def check_remembered(self) -> None:
        """Backward has ended, and no bucket was delivered yet.

        Raises:
            MisuseError: a gradient came late.
        """
        if self._guard is not None:
            self._guard.check_versions()

    def alias(self, untouched: Collection[int] = ()) -> None:
        """Make each parameter's gradient the view itself, except those given by index."""
        if untouched:
            for index, parameter, view in self._members():
                if index not in untouched:
                    parameter.grad = view
        else:
            for parameter, view in zip(self.parameters, self.views, strict=True):
                parameter.grad = view

    def _restore(self, untouched: Collection[int]) -> None:
        if not self._kept:
            return
        kept, self._kept = self._kept, {}
        with torch.no_grad():
            for index, _, view in self._members():
                if index in untouched and index in kept:
                    view.copy_(kept[index])

    def _members(self) -> zip[tuple[int, torch.nn.Parameter, torch.Tensor]]:
        return zip(self.indices, self.parameters, self.views, strict=True)

    def _are_views(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        return all(map(operator.is_, gradients, self.views))

    def _check_and_copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        # What would be copied without a word is asked for at once; the rest is looked into if copying fails.
        if set(map(_dtype_of, sources)) != {self.buffer.dtype} or torch._C._any_requires_grad(*sources):
            self._complain()
        self._copy(targets, sources)

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        with torch.inference_mode():  # passes autograd by, which takes a sixth less time for small ones than `no_grad`
            if self._holds_vectors and len(targets) == len(self.views):
                with suppress(RuntimeError):  # it refuses what lies in the buffer already, in other tensors than the views
                    torch.cat(sources, out=self.buffer)
                    return
            try:
                torch._foreach_copy_(targets, sources)
            except RuntimeError:
                self._complain()
                raise

    def _complain(self) -> None:
        for parameter, name in zip(self.parameters, self.names, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise complaints.wrong_layout(name, gradient, self._place)
            if gradient.dtype is not self.buffer.dtype:
                raise complaints.wrong_dtype(name, gradient, self.buffer.dtype, self._place)
            if gradient.requires_grad:
                raise complaints.differentiable(name)


def some_are_none(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Whether there are any None."""
    return any(map(operator.is_, gradients, repeat(None)))


def _new_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """For a parameter that is unused here, or whose gradient somebody took away while backward ran."""
    parameter.grad = torch.empty_like(parameter)
    return parameter.grad


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
