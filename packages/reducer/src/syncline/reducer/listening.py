"""The hooks on parameters: on each, which notes its gradient, or on the last one of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from .arrivals import Arrivals
from .graph_task import accumulates, node_of, not_frozen
from .whole_buckets import WholeBuckets


class Listening:
    """The hooks themselves; see Note [One hook for a bucket] for where they are.

    Args:
        parameters: the parameters.
        wake: called when arrivals are worth a look.
        settled: called after all hooks on a parameter, if `follow` asked for it.

    Attributes:
        noted: for each bucket whose gradients are noted its arrivals, by its number.
        others: further arrivals: of hooked parameters of buckets that have one hook, and of those that should get no gradient.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, wake: Callable[[Arrivals], None], settled: Callable[[], None]
    ) -> None:
        self._listeners = [Listener(index, parameter) for index, parameter in enumerate(parameters)]
        self._wake = wake
        self._settled = settled
        self._is_closed = False
        self.noted: dict[int, Arrivals] = {}
        self.others: list[Arrivals] = []

    def listen(self, buckets: Sequence[Collection[int]], whole: WholeBuckets, *, for_now: bool) -> None:
        """Hook parameters, after taking off all hooks from before.

        Args:
            buckets: the parameters in each, by index.
            whole: which buckets are looked at as a whole, and which parameters are hooked there. In other buckets each gradient
                is noted.
            for_now: note gradients by hooks that leave no trace when they are taken off, and cost more while they are there.
        """
        self.remove()
        if self._is_closed:
            return
        for number, indices in enumerate(buckets):
            if number not in whole.awaited:
                self.noted[number] = self._note(indices, for_now=for_now)
                continue
            self.others += [self._note_whole(index, whole) for index in indices if index in whole.hooked]
            self.others.append(self._note(set(indices).difference(whole.awaited[number])))  # none should come

    def follow(self, index: int) -> None:
        """From the next backward on, see to what waits as soon as all hooks on this parameter have run."""
        self._listeners[index].follow(self._settled)

    def left_over(self) -> Iterator[Arrivals]:
        """Those that hold gradients which nobody has looked at."""
        return (arrivals for arrivals in [*self.noted.values(), *self.others] if arrivals.indices)

    def remove(self) -> None:
        """Take all hooks off."""
        self.noted, self.others = {}, []
        for listener in self._listeners:
            listener.remove()

    def close(self) -> None:
        """Take all hooks off, for good."""
        self._is_closed = True
        self.remove()

    def _note(self, indices: Collection[int], *, for_now: bool = False) -> Arrivals:
        arrivals, last = Arrivals(), None
        for last in indices:
            self._listeners[last].note_in(arrivals, self._wake, for_now=for_now)
        if last is not None:
            self.follow(last)  # the last to arrive, as far as is known
        return arrivals

    def _note_whole(self, index: int, whole: WholeBuckets) -> Arrivals:
        arrivals = Arrivals(are_settled=index in whole.hooked_at_nodes)
        if arrivals.are_settled:
            self._listeners[index].note_settled_in(arrivals, self._wake)
        else:
            self._listeners[index].note_in(arrivals, self._wake, for_now=False)
            if index == whole.awaited[whole.number_of(index)][-1]:
                self.follow(index)
        return arrivals


class Listener:
    """The hooks on one parameter.

    Args:
        index: the parameter's.
        parameter: the parameter.
    """

    def __init__(self, index: int, parameter: torch.nn.Parameter) -> None:
        self._index = index
        self._parameter = parameter
        self._node: torch.autograd.graph.Node | None = None
        self._follows = False
        self._handles: list[Any] = []

    def note_in(self, arrivals: Arrivals, wake: Callable[[Arrivals], None], *, for_now: bool) -> None:
        """From now on note the gradient there, and nowhere else, and wake when that is worth a look."""
        self.remove()
        note = _hook(self._index, arrivals, wake)
        with not_frozen(self._parameter):
            if for_now:
                # It is called just before a gradient is accumulated, and by torch.autograd.grad, which does not do that.
                handle = self._parameter.register_hook(  # type: ignore[no-untyped-call]
                    lambda _: note(_) if accumulates(self._parameter) else None
                )
            else:
                handle = self._parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        self._handles.append(handle)

    def note_settled_in(self, arrivals: Arrivals, wake: Callable[[Arrivals], None]) -> None:
        """The same, after all hooks on the parameter. It ends if the parameter gets another node, by a change of its dtype."""
        self.remove()
        note = _hook(self._index, arrivals, wake)
        self._hook_node(lambda *_: note(None))

    def follow(self, callback: Callable[[], None]) -> None:
        """From the next backward on, call back as soon as all hooks on this parameter have run; once, if said twice."""
        if not self._follows:
            self._follows = True
            self._hook_node(lambda *_: callback())

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        if self._handles and not self._parameter._backward_hooks:
            self._parameter._backward_hooks = None  # autograd calls into Python for an empty dictionary, too
        self._handles, self._node, self._follows = [], None, False

    def _hook_node(self, hook: Callable[..., None]) -> None:
        if self._node is None:
            # Held, because autograd makes a new node, without the hook, if nobody holds the old one.
            self._node = node_of(self._parameter)
        self._handles.append(self._node.register_hook(hook))


def _hook(index: int, arrivals: Arrivals, wake: Callable[[Arrivals], None]) -> Callable[[object], None]:
    indices, steps, add = arrivals.indices, arrivals.steps, arrivals.indices.append

    def note(_: object) -> None:
        add(index)
        if len(indices) in steps:
            wake(arrivals)

    return note
