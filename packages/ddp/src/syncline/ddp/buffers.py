"""Synchronise the buffers of a wrapped module between the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from syncline.collectives import InvalidTypeError, ProcessGroup, broadcast_coalesced
from syncline.collectives.internal import bytes_of, in_plain_order, mark_written

from . import torch_internals
from .module_state import ModuleState, writable
from .outputs import PLAIN, leaves

if TYPE_CHECKING:
    AnyFuture: TypeAlias = torch.futures.Future[Any]
else:
    AnyFuture = torch.futures.Future


@dataclass(frozen=True)
class BufferHook:
    """A user's hook that synchronises buffers in place of a broadcast.

    Attributes:
        state: the hook's first argument.
        hook: a function `hook(state, buffers)`, which gets a dict of the buffers by name, and changes the buffers in place. The
            function may return futures. If the backward of this forward averages gradients, this backward waits for the futures
            at its end. Otherwise the forward waits for the futures at its end.
        follows_forward: whether the hook runs after the module's forward. False: before the forward.
    """

    state: Any
    hook: Callable[[Any, dict[str, torch.Tensor]], Sequence[AnyFuture] | None]
    follows_forward: bool

    def __post_init__(self) -> None:
        if not callable(self.hook):
            raise InvalidTypeError(f"expected a function hook(state, buffers), found {type(self.hook).__name__}")


class Buffers:
    """Keeps the buffers of a module equal on all ranks.

    Attributes:
        enabled: whether forwards synchronise the buffers.
        are_stale: whether buffers may differ between ranks. True at first, and after each forward whose backward averages
            gradients.
        hook: the hook that synchronises the buffers; None means a broadcast.
    """

    def __init__(self, state: ModuleState, *, enabled: bool) -> None:
        self._state = state
        # See `note_modes`.
        self._open_forwards: list[_OpenForward] = []
        self._modes_without_graph: dict[torch.nn.Module, bool] = {}
        self._reductions = 0
        self.look_again()
        self.enabled = enabled
        self.are_stale = True
        self.hook: BufferHook | None = None

    def look_again(self) -> None:
        """Check again whether the module has buffers. A buffer that only a forward fills does not count, as in torch."""
        self._exist = bool(self._state.buffers())
        self._layers = self._state.normalization_layers()

    @property
    def are_due(self) -> bool:
        """Whether the next forward synchronises the buffers."""
        return self.are_stale and self.enabled and self._exist and not self.are_out_of_reach

    @property
    def are_out_of_reach(self) -> bool:
        """Whether the module runs in a `torch.func.functional_call` that replaces buffers."""
        if not self._exist:
            return False
        given = torch_internals.given_to_functional_call()
        return bool(given) and any(id(buffer) in given for _, buffer in self._state.buffers())

    def broadcast(self, group: ProcessGroup, root: int) -> None:
        """Copy the root's buffers into the buffers of every rank. This is a collective."""
        buffers = [buffer for _, buffer in self._state.buffers()]
        # The root's buffers do not change, so its graphs stay valid.
        only_reads = group.rank == root
        with (
            nullcontext() if only_reads else self._seen_by_autograd_if_changed(buffers),
            group.marked("buffers of the model"),  # the program has not called a broadcast, so errors must say where it is
        ):
            broadcast_coalesced(writable(buffers), group=group, root=root)

    def before_forward(self, group: ProcessGroup, root: int) -> list[AnyFuture]:
        """If the buffers are due, synchronise them, unless a hook will do so after the forward.

        Returns:
            Futures for which the end of backward must wait.
        """
        if not self.are_due or (self.hook is not None and self.hook.follows_forward):
            return []
        if self.hook is None:
            self.broadcast(group, root)
            return []
        return self._run(self.hook)

    def note_modes(self, outputs: object, reductions: int) -> None:
        """Record which layers of batch normalisation were in training mode in the forward that has just ended.

        In evaluation mode, backward reads the running statistics, so the statistics must not change before backward. Call this
        method only after a forward with gradients. A forward is forgotten when the graph of its outputs is gone.

        `reductions` is the number of backwards that have averaged gradients so far. When this number grows, the method forgets
        all forwards without a layer in evaluation mode.
        """
        if reductions != self._reductions:
            self._reductions = reductions
            self._open_forwards = [forward for forward in self._open_forwards if not all(forward.modes.values())]
            self._modes_without_graph = {}
        # Without batch normalisation there are no modes to record.
        if not self._layers:
            return
        modes = {layer: layer.training for layer in self._layers}
        marks, are_complete = _mark_graph(outputs)
        self._open_forwards = [forward for forward in self._open_forwards if forward.is_open()]
        if marks:
            self._open_forwards.append(_OpenForward(modes, marks))
        # Without all nodes, nothing tells when the forward's graph is gone. One record of all such forwards is enough.
        if not are_complete:
            earlier = self._modes_without_graph
            self._modes_without_graph = {layer: earlier.get(layer, True) and mode for layer, mode in modes.items()}

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has no hooks. The hook's state may hold a group, which cannot be copied.
        return {**self.__dict__, "_open_forwards": [], "_modes_without_graph": {}, "hook": None}

    def after_forward(self) -> list[AnyFuture]:
        """If the buffers are due, and the hook follows the forward, call the hook, which synchronises the buffers.

        Return the hook's futures, for which the end of backward must wait.
        """
        return self._run(self.hook) if self.hook is not None and self.hook.follows_forward and self.are_due else []

    def forward_ended(self, will_reduce: bool) -> None:
        """Record that a forward has run. `will_reduce` says whether its backward averages gradients."""
        # As in torch, only a forward whose backward averages gradients counts as a change of the buffers.
        # Buffers that were out of reach in this forward may still differ.
        self.are_stale = will_reduce or self.are_out_of_reach

    def forward_failed(self, will_reduce: bool) -> None:
        """Record that the module's forward has raised an error on all ranks.

        After this call, the buffers are due on all ranks or on no rank.
        """
        if self.hook is None or not self.hook.follows_forward:  # a hook that follows the forward has not run
            self.forward_ended(will_reduce)

    def _run(self, hook: BufferHook) -> list[AnyFuture]:
        buffers = dict(self._state.buffers())
        with torch.no_grad(), self._seen_by_autograd_if_changed(list(buffers.values())):
            return list(hook.hook(hook.state, buffers) or ())

    @contextmanager
    def _seen_by_autograd_if_changed(self, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """A context for writes to buffers. Autograd sees a write only if it changes a value that a backward may read.

        If autograd saw all writes, a second forward could not run before the backward of the first forward.
        """
        noted = [forward.modes for forward in self._open_forwards if forward.is_open()] + [self._modes_without_graph]
        # In training mode, backward does not read the running statistics, although autograd has saved them.
        unread: set[int] = set()
        for layer in self._state.normalization_layers():
            # If no open forward has noted the layer's mode, the present mode decides.
            if all([modes[layer] for modes in noted if layer in modes] or [layer.training]):
                unread.update(id(buffer) for buffer in layer.buffers(recurse=False))
        others = [buffer for buffer in buffers if id(buffer) not in unread]
        before = [_bits(buffer).clone() for buffer in others]
        with torch_internals.preserve_versions(buffers):
            yield
        # A graph may have saved any other buffer, so show autograd each write that changes a value.
        for buffer, bits in zip(others, before, strict=True):
            if not torch.equal(_bits(buffer), bits):
                mark_written(buffer)


class _Mark:
    """An object that a node of a graph holds, until the node is gone or a backward has freed the node's saved tensors.

    A weak reference to the node itself would die at once: torch makes a new Python object for the node at each access.
    """


@dataclass(frozen=True)
class _OpenForward:
    """A forward whose backward may still come.

    Attributes:
        modes: for each layer of batch normalisation, whether the layer was in training mode.
        marks: the marks of the outputs' nodes.
    """

    modes: dict[torch.nn.Module, bool]
    marks: list[weakref.ref[_Mark]]

    def is_open(self) -> bool:
        return any(mark() is not None for mark in self.marks)


_HOOK = "syncline.ddp: forgets the mark"  # a key in the metadata of a node


def _mark_graph(outputs: object) -> tuple[list[weakref.ref[_Mark]], bool]:
    """Mark the nodes of the outputs. Return the marks, and whether the node of every output is known."""
    marks, are_complete = [], True
    for value in leaves(outputs):
        if not isinstance(value, torch.Tensor):
            are_complete &= isinstance(value, PLAIN)
            continue
        try:
            node = value.grad_fn
        except RuntimeError:  # the tensor is a view, and its base was changed in a way that autograd does not allow
            are_complete = False
            continue
        if node is not None:
            marks.append(weakref.ref(_mark(node)))
    return marks, are_complete


def _mark(node: torch.autograd.graph.Node) -> _Mark:
    metadata: Any = node.metadata  # a dict, but torch's types say a method
    mark: _Mark = metadata.setdefault(_Mark, _Mark())

    def forget(_: object) -> None:  # a reference to the node would keep the node alive
        if not torch_internals.backward_keeps_graph():
            metadata.pop(_Mark, None)

    # Several forwards may end in one node, which gets only one hook.
    if _HOOK not in metadata:
        metadata[_HOOK] = node.register_prehook(forget)
    return mark


def _bits(buffer: torch.Tensor) -> torch.Tensor:
    # In a comparison of bytes, a NaN equals itself.
    return bytes_of(in_plain_order(buffer.detach()))
