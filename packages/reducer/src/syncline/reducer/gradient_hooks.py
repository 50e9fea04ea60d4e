"""Hooks on parameters, which record gradients."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from syncline.collectives import ProcessGroup

from . import torch_internals
from .pending_gradients import PendingBucket, PendingGradients
from .torch_internals import GraphNode, accumulation_node, hookable


class GradientHooks:
    """The hooks that tell a reducer when gradients have come.

    Note [After all users' hooks]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Users' hooks may change a gradient, and may run after the reducer's hook on the parameter. So the reducer collects a bucket
    only after the parameter's autograd node has finished, when all hooks on its latest gradient have run.

    A hook on every node would double the cost. So at first, each bucket hooks only the node of the parameter whose gradient is
    expected last. If the gradient of another parameter comes last, the bucket waits for the next gradient that wakes the
    reducer, or for the end of backward. From the next backward on, the node of this other parameter also has a hook.

    The node of every delayed parameter has a hook from the start. Each gradient of a delayed parameter must be taken before the
    gradient for which the parameter waits. In re-entrant checkpoints, these gradients come in different inner backwards. So
    without this hook, the reducer might look at the delayed bucket only at the end of backward, which is too late.

    Args:
        parameters: the reducer's parameters.
        group: the group whose ranks average their gradients.
        delayed: the indices of the delayed parameters.
        reads_in_place: whether this reducer averages gradients in their own memory.
        wake: called on the thread of backward when the reducer must look at a bucket (see `PendingBucket.wake_at`).
        node_done: called when all hooks on a parameter have run, with the arguments of `hook_node`.
        retire: called by another reducer of the same parameters. Returns True if no backward of this reducer is running or
            expected. Then this reducer's hooks are removed until the next call of `register`.

    `wake`, `node_done` and `retire` are methods of the reducer, kept as weak references.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        group: ProcessGroup,
        *,
        delayed: Collection[int],
        reads_in_place: bool,
        wake: Callable[[PendingBucket], None],
        node_done: Callable[[int, PendingBucket], None],
        retire: Callable[[], bool],
    ) -> None:
        self._parameters = parameters
        # The reducer's finalizer holds this object, so this object must not hold the group. After a failure, the traceback of
        # the group's error holds the reducer, which would then never be freed.
        self._group = weakref.ref(group)
        self._ranks = frozenset(group.ranks)
        self._delayed = frozenset(delayed)
        self._wake = weakref.WeakMethod(wake)
        self._node_done = weakref.WeakMethod(node_done)
        self._retire = weakref.WeakMethod(retire)
        self._handles: list[Any] = []
        self._nodes: list[GraphNode] = []
        self._hooked: dict[int, tuple[GraphNode, Any]] = {}
        self._is_closed = self.are_off = False
        self.reads_in_place = reads_in_place
        self._others: weakref.WeakSet[GradientHooks] = weakref.WeakSet()
        _introduce(self)

    def register(self, pending: PendingGradients) -> None:
        """Remove all earlier hooks, and register a hook on every parameter. The new hooks record gradients in `pending`.

        Note [One stream for all gradients]
        ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
        A parameter's accumulation node runs on the CUDA stream that was current when autograd made the node. Without a
        reference to the node, autograd makes a new node in each forward, perhaps on another stream. Then a bucket would wait
        for only one of two streams. So the reducer holds references to the nodes of all parameters.
        """
        self._remove()
        self.are_off = self._is_closed
        # A closed reducer never hooks its parameters again.
        if self._is_closed:
            return
        # Do not hold the nodes of parameters on the CPU, which has no streams. If a user resizes a parameter, autograd then
        # makes a node with the new shape. So autograd raises no error, but the bucket does, and names the parameter.
        self._nodes = [accumulation_node(parameter) for parameter in self._parameters if not parameter.is_cpu]
        for bucket in pending:
            for index in bucket.members:
                self._hook_parameter(index, bucket)
                if index == bucket.members[-1] or index in self._delayed:
                    self.hook_node(index, bucket)

    def hook_node(self, index: int, bucket: PendingBucket) -> None:
        """From the next backward on, call `node_done(index, bucket)` when all hooks on this parameter have run."""
        node = accumulation_node(self._parameters[index])
        hooked, handle = self._hooked.get(index, (None, None))
        if self._is_closed or hooked is node:
            return
        if handle is not None:  # the parameter was converted, so it has another node
            handle.remove()
        node_done = self._node_done

        def tell(*_: object) -> None:
            method = node_done()
            if method is not None:
                method(index, bucket)

        self._hooked[index] = node, node.register_hook(tell)

    def take_over(self) -> bool:
        """Remove the hooks of other reducers of the same parameters.

        A reducer keeps its hooks if one of its forwards waits for its backward, or if one of its backwards is running. Then
        both reducers average the gradients. Two reducers disturb each other if one of them averages gradients in place, if both
        use one group, or if their groups have different ranks.

        Returns:
            False if a reducer that disturbs this reducer keeps its hooks.
        """
        # The usual case: no parameter has a second reducer.
        if not self._others:
            return True
        with _lock:
            others = [other for other in self._others if not other.are_off]
        in_use = [one for one in others if not one._step_aside()]
        return not any(
            self.reads_in_place or one.reads_in_place or self._group() is one._group() or self._ranks != one._ranks
            for one in in_use
        )

    def _step_aside(self) -> bool:
        retire = self._retire()
        # The reducer is in use, so its hooks stay. A reducer that is gone (None) no longer needs its hooks.
        if retire is not None and not retire():
            return False
        self._remove()
        self.are_off = True
        return True

    def close(self) -> None:
        """Remove all hooks permanently."""
        self._is_closed = self.are_off = True
        self._remove()

    def _hook_parameter(self, index: int, bucket: PendingBucket) -> None:
        add, indices, wake = bucket.indices.append, bucket.indices, self._wake

        def note(_: object) -> None:
            add(index)
            # This runs for every gradient; see Note [What one gradient costs] in `pending_gradients`.
            if len(indices) in bucket.wake_at:
                # If the reducer is gone, and only its hooks are left, `wake()` returns None.
                method = wake()
                if method is not None:
                    method(bucket)

        parameter = self._parameters[index]
        with hookable(parameter):
            self._handles.append(parameter.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
        if not torch_internals.TELLS_OF_UNDEFINED_GRADIENTS:
            self._handles.append(torch_internals.hook_undefined_gradients(parameter, lambda: note(None)))

    def _remove(self) -> None:
        for handle in (*self._handles, *(handle for _, handle in self._hooked.values())):
            handle.remove()
        self._handles, self._hooked, self._nodes = [], {}, []


_lock = threading.RLock()  # reentrant: the garbage collector may run while the lock is held, and may call into this module
_living: weakref.WeakSet[GradientHooks] = weakref.WeakSet()


def _introduce(hooks: GradientHooks) -> None:
    mine = set(map(id, hooks._parameters))
    with _lock:
        for other in list(_living):
            if not mine.isdisjoint(map(id, other._parameters)):
                other._others.add(hooks)
                hooks._others.add(other)
        _living.add(hooks)
