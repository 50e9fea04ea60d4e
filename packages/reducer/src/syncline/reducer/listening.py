"""The hooks on parameters: on each, which notes its gradient, or on the last one of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .arrivals import Arrivals


class Listening:
    """All hooks of a reducer.

    Note [One hook for a bucket]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A hook on a parameter costs about a microsecond, most of it outside of the function that is called. In a static graph the
    order of gradients is known, too: the first backward showed it to each rank. So from then on only that parameter of a bucket
    is hooked that is the last to get its gradient, and the one that is the first of all, with which a backward begins. The
    others are proven to have come by being there: their gradients were None in forward, and no other backward ran since. Where
    that is not so (gradients are kept, or added up without synchronisation), and where one is not there (the order has
    changed), the bucket waits for the end of backward, and from the next forward on each gradient is noted again, for good: it
    costs time and nothing else.

    A gradient that comes a second time when its bucket is reduced already is an error; see `LatenessGuard`. Not seen is a
    backward that reaches neither the first parameter nor the last one of any bucket; a static graph has none.

    A parameter that ever had a hook of its own has the cost of it for good, even when the hook is removed (measured with torch
    2.13). So while a static graph is learnt, gradients are noted by hooks on nodes of the graph, which go with the nodes. They
    also go when a parameter changes its dtype or device, be it within a forward; `displaced` tells. Such a model has a hook
    for each parameter.

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

    def listen(
        self, buckets: Sequence[Collection[int]], whole: Mapping[int, Sequence[int]], first: int | None, *, on_nodes: bool
    ) -> None:
        """Hook parameters, after taking off all hooks from before.

        Args:
            buckets: the parameters in each, by index.
            whole: of each bucket that shall have one hook, by number, those parameters that get a gradient, the last one at the
                end. In other buckets each gradient is noted.
            first: the parameter with which a backward begins, if that is not to be noted anyway.
            on_nodes: note on nodes of the graph where gradients are noted, but for one parameter of each bucket.
        """
        self.remove()
        if self._is_closed:
            return
        for number, indices in enumerate(buckets):
            if number not in whole:
                self.noted[number] = self._note(indices, on_nodes=on_nodes)
                continue
            self.others += [self._note([index]) for index in indices if index in (whole[number][-1], first)]
            self.others.append(self._note(set(indices).difference(whole[number])))  # none should come

    def follow(self, index: int) -> None:
        """From the next backward on, see to what waits as soon as all hooks on this parameter have run."""
        self._listeners[index].follow(self._settled)

    def arrivals(self) -> Iterator[Arrivals]:
        """All there are."""
        yield from self.noted.values()
        yield from self.others

    def remove(self) -> None:
        """Take all hooks off."""
        self.noted, self.others = {}, []
        for listener in self._listeners:
            listener.remove()

    def close(self) -> None:
        """Take all hooks off, for good."""
        self._is_closed = True
        self.remove()

    def displaced(self) -> list[int]:
        """The parameters whose nodes, on which gradients are noted, are in the graph no more."""
        return [index for index, listener in enumerate(self._listeners) if listener.is_displaced]

    def _note(self, indices: Collection[int], *, on_nodes: bool = False) -> Arrivals:
        arrivals, last = Arrivals(), None
        for last in indices:
            self._listeners[last].note_in(arrivals, self._wake, on_node=on_nodes)
        if last is not None:
            if on_nodes:
                self._listeners[last].note_in(arrivals, self._wake, on_node=False)
            self.follow(last)  # the last to arrive, as far as is known
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
        self._notes_on_node = False
        self._handles: list[Any] = []

    def note_in(self, arrivals: Arrivals, wake: Callable[[Arrivals], None], *, on_node: bool) -> None:
        """From now on note the gradient there, and nowhere else, and wake when that is worth a look."""
        self.remove()
        note = _hook(self._index, arrivals, wake)
        if on_node:
            self._hook_node(lambda _, gradients: note(*gradients) if gradients[0] is not None else None)
            self._notes_on_node = True
        else:
            with _not_frozen(self._parameter):
                handle = self._parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    @property
    def is_displaced(self) -> bool:
        """Whether gradients are noted on a node that the parameter has no more."""
        return self._notes_on_node and _node_of(self._parameter) is not self._node

    def follow(self, callback: Callable[[], None]) -> None:
        """From the next backward on, call back as soon as all hooks on this parameter have run; once, if said twice."""
        if not self._follows:
            self._follows = True
            self._hook_node(lambda *_: callback())

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._node, self._follows, self._notes_on_node = [], None, False, False

    def _hook_node(self, hook: Callable[..., None]) -> None:
        if self._node is None:
            # Held, because autograd makes a new node, without the hook, if nobody holds the old one.
            self._node = _node_of(self._parameter)
        self._handles.append(self._node.register_hook(hook))


def _node_of(parameter: torch.nn.Parameter) -> torch.autograd.graph.Node:
    with torch.inference_mode(False), _not_frozen(parameter):
        return torch.autograd.graph.get_gradient_edge(parameter).node


@contextmanager
def _not_frozen(parameter: torch.nn.Parameter) -> Iterator[None]:
    """A parameter that was frozen may be hooked, too, for the time when it is not."""
    if parameter.requires_grad:
        yield
        return
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(False)


def _hook(index: int, arrivals: Arrivals, wake: Callable[[Arrivals], None]) -> Callable[[torch.Tensor], None]:
    indices, steps, add = arrivals.indices, arrivals.steps, arrivals.indices.append

    def note(_: torch.Tensor) -> None:
        add(index)
        if len(indices) in steps:
            wake(arrivals)

    return note
