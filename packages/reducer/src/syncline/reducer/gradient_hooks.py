"""The hooks on parameters: each notes that its parameter has a gradient."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from syncline.collectives import ProcessGroup

from .pending_gradients import PendingBucket, PendingGradients
from .torch_internals import GraphNode, accumulation_node, hookable


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
        wake: Callable[[PendingBucket], None],
        node_done: Callable[[int, PendingBucket], None],
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._wake = weakref.WeakMethod(wake)
        self._node_done = weakref.WeakMethod(node_done)
        self._handles: list[Any] = []
        self._nodes: list[GraphNode] = []
        self._hooked: dict[int, tuple[GraphNode, Any]] = {}
        self._is_closed = False
        self.reads_in_place = reads_in_place
        self._others: weakref.WeakSet[GradientHooks] = weakref.WeakSet()
        _introduce(self)

    def register(self, pending: PendingGradients) -> None:
        """Hook every parameter, after taking off all hooks from before: gradients are noted in their buckets.

        Note [One stream for all gradients]
        ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
        Autograd accumulates a gradient on the stream that was current when the parameter's node was made. It makes a new node
        in each forward if nobody holds the old one. A bucket is collected on the stream of its last gradient, so all of its
        nodes must belong to one stream. The reducer holds all of them: to hold a node costs nothing, to hook one costs time. If
        it held only some, a forward on another stream than that of construction (`with torch.cuda.stream(...)`, CUDA graphs)
        would leave the nodes on two streams, and nothing would order the others' gradients before the collection.
        """
        self._remove()
        if self._is_closed:
            return
        # The CPU has no streams. There a new node serves better: it knows the shape of a parameter that was resized, so the
        # error comes from the bucket, which names the parameter.
        self._nodes = [accumulation_node(parameter) for parameter in self._parameters if not parameter.is_cpu]
        for bucket in pending:
            for index in bucket.members:
                self._hook_parameter(index, bucket)
            self.hook_node(bucket.members[-1], bucket)

    def hook_node(self, index: int, bucket: PendingBucket) -> None:
        """From the next backward on, tell when all hooks on this parameter, whose gradient is noted there, have run."""
        node = accumulation_node(self._parameters[index])
        hooked, handle = self._hooked.get(index, (None, None))
        if self._is_closed or hooked is node:
            return
        if handle is not None:  # the parameter was converted, and has another node
            handle.remove()
        node_done = self._node_done

        def tell(*_: object) -> None:
            method = node_done()
            if method is not None:
                method(index, bucket)

        self._hooked[index] = node, node.register_hook(tell)

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

    def _hook_parameter(self, index: int, bucket: PendingBucket) -> None:
        add, indices, wake = bucket.indices.append, bucket.indices, self._wake

        def note(_: object) -> None:
            add(index)
            if len(indices) in bucket.wake_at:
                method = wake()
                if method is not None:
                    method(bucket)

        parameter = self._parameters[index]
        with hookable(parameter):
            self._handles.append(parameter.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]

    def _remove(self) -> None:
        for handle in (*self._handles, *(handle for _, handle in self._hooked.values())):
            handle.remove()
        self._handles, self._hooked, self._nodes = [], {}, []


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
