"""The hooks on parameters: each notes that its parameter has a gradient."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from syncline.collectives import ProcessGroup

from . import torch_internals
from .torch_internals import GraphNode, accumulation_node, hookable

EVERY_GRADIENT: Container[int] = range(1, 1 << 62)


class PendingGradients:
    """The gradients of one bucket that autograd has accumulated, and that the reducer has not looked at yet.

    Note [What one gradient costs]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Autograd calls a Python function for every gradient, about a microsecond, and that call is what a reducer in Python costs
    most. So the function only appends an index to a list. It wakes the reducer at a bucket's first gradient, because a
    backward may begin with it, and when the bucket may be complete. All parameters of a bucket are on one device, and autograd
    has one thread for each device, so nobody else appends meanwhile.

    Attributes:
        indices: the parameters, in the order in which their gradients came.
        wake_at: the lengths of `indices` at which the reducer is woken.
    """

    __slots__ = ("_needed", "indices", "wake_at")

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.expect(None)

    def expect(self, needed: int | None, *, watch_all: bool = False) -> None:
        """So many gradients make the bucket worth a look (None: each does); with `watch_all` every one wakes the reducer."""
        self._needed = needed or 1
        self.wake_at: Container[int] = EVERY_GRADIENT if watch_all or needed is None else (1, needed)

    @property
    def are_enough(self) -> bool:
        """Whether the bucket is worth a look."""
        return len(self.indices) >= self._needed

    def take(self, *, but_last: bool = False) -> list[int]:
        """Hand over what has come, but for the latest one if users' hooks on it still run. The next is worth a look at once."""
        count = len(self.indices) - but_last
        taken = self.indices[:count]
        del self.indices[:count]
        self._needed = 1
        return taken


class GradientHooks:
    """All hooks of one reducer.

    Note [After all users' hooks]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Users' hooks may change a gradient, and those that were registered after ours run after it. So a bucket is never collected
    inside our hook on a parameter, but when all hooks on the latest gradient have run: at the end of the parameter's node in
    the graph. Hooking every node would cost as much again as noting. So only that parameter's node is hooked which is expected
    to complete its bucket. Where another one does, the bucket waits for the next gradient that wakes the reducer in the same
    backward, or for the end of backward, and that parameter's node is hooked from then on.

    Args:
        parameters: the reducer's.
        group: the ranks that average.
        reads_in_place: whether gradients are averaged where they are, so that nobody else can read them meanwhile.
        wake: called on the thread of backward, inside a hook, when a bucket is worth a look. A method, held
            weakly: hooks do not keep the reducer alive.
        node_done: the same, called when all hooks on a parameter have run that `hook_node` was given, with what that was given.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        group: ProcessGroup,
        *,
        reads_in_place: bool,
        wake: Callable[[PendingGradients], None],
        node_done: Callable[[int, PendingGradients], None],
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._wake = weakref.WeakMethod(wake)
        self._node_done = weakref.WeakMethod(node_done)
        self._handles: list[Any] = []
        self._nodes: dict[int, tuple[GraphNode, Any]] = {}
        self._is_closed = False
        self.reads_in_place = reads_in_place
        self._others: weakref.WeakSet[GradientHooks] = weakref.WeakSet()
        _introduce(self)

    def register(self, buckets: Sequence[Sequence[int]]) -> list[PendingGradients]:
        """Hook every parameter, after taking off all hooks from before; return where the gradients of each bucket are noted.

        The parameters of a bucket stand in the order in which their gradients are expected.
        """
        self._remove()
        pending = [PendingGradients() for _ in buckets]
        if self._is_closed:
            return pending
        for indices, noted in zip(buckets, pending, strict=True):
            for index in indices:
                self._hook_parameter(index, noted)
            self.hook_node(indices[-1], noted)
        return pending

    def hook_node(self, index: int, pending: PendingGradients) -> None:
        """From the next backward on, tell when all hooks on this parameter, whose gradient is noted there, have run."""
        node = accumulation_node(self._parameters[index])
        hooked, handle = self._nodes.get(index, (None, None))
        if self._is_closed or hooked is node:
            return
        if handle is not None:  # the parameter was converted, and has another node
            handle.remove()
        node_done = self._node_done

        def tell(*_: object) -> None:
            method = node_done()
            if method is not None:
                method(index, pending)

        self._nodes[index] = node, node.register_hook(tell)

    @property
    def conflicts_with_another_reducer(self) -> bool:
        """Whether another reducer has hooks on some of the parameters, and one would disturb the other.

        It does if one of them averages gradients in place. It does, too, if both use one group: gradients may come in another
        order on each rank, and then the buckets of the two would mix.
        """
        with _lock:
            others = [other for other in self._others if not other._is_closed]
        return any(self.reads_in_place or other.reads_in_place or self._group is other._group for other in others)

    def close(self) -> None:
        """Take all hooks off, for good."""
        self._is_closed = True
        self._remove()

    def _hook_parameter(self, index: int, pending: PendingGradients) -> None:
        add, indices, wake = pending.indices.append, pending.indices, self._wake

        def note(_: object) -> None:
            add(index)
            if len(indices) in pending.wake_at:
                method = wake()
                if method is not None:
                    method(pending)

        parameter = self._parameters[index]
        with hookable(parameter):
            self._handles.append(parameter.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
        if not torch_internals.TELLS_OF_UNDEFINED_GRADIENTS:
            self._handles.append(torch_internals.hook_undefined_gradients(parameter, lambda: note(None)))

    def _remove(self) -> None:
        for handle in (*self._handles, *(handle for _, handle in self._nodes.values())):
            handle.remove()
        self._handles, self._nodes = [], {}


_lock = threading.RLock()  # reentrant, because the garbage collector may run anything, also in between
_living: weakref.WeakSet[GradientHooks] = weakref.WeakSet()


def _introduce(hooks: GradientHooks) -> None:
    """Make new hooks, and all others on some of the same parameters, known to each other."""
    mine = set(map(id, hooks._parameters))
    with _lock:
        for other in list(_living):
            if not mine.isdisjoint(map(id, other._parameters)):
                other._others.add(hooks)
                hooks._others.add(other)
        _living.add(hooks)
