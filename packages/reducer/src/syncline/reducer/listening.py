"""The hooks on parameters: on each, which notes its gradient, or on one of a bucket, which says that all have come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .arrivals import Arrivals


class Listening:
    """All hooks of a reducer.

    Note [One hook for a bucket]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A hook on a parameter costs about a microsecond, most of it outside of the function that is called. In a static graph the
    order of gradients is known, too: the first backward showed it to each rank. So from then on only the parameter of a bucket
    that is the last to get its gradient is hooked, and the one that is the first of all, with which a backward begins. The
    others are proven to have come by being there: their gradients were None in forward. Where they were not (they are kept
    between backwards, or added up without synchronisation), and where the order turns out to change, each gradient is noted
    again, for good: it costs time and nothing else.

    What is not noted could come a second time, or so late that its bucket is reduced already. Then it changes a gradient that
    the bucket remembers (see `LatenessGuard`), and that is an error. Not seen is only a backward that reaches neither the first
    parameter nor the last one of any bucket; a static graph has none.

    The first backward of a static graph is noted by hooks on nodes of the graph, which go with the nodes. A parameter that ever
    had a hook of its own has the cost of it for good, even when the hook is removed (measured with torch 2.13).

    Args:
        parameters: the parameters.
        wake: called when arrivals are worth a look.
        settled: called after all hooks on a parameter, if `follow` asked for it.
        filled: called with the number of a bucket of which all gradients should have come.
        began: called when the gradient has come that should be the first.

    Attributes:
        noted: for each bucket whose gradients are noted its arrivals, by its number.
        unexpected: what has arrived in other buckets although no backward should give it a gradient.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        wake: Callable[[Arrivals], None],
        settled: Callable[[], None],
        filled: Callable[[int], None],
        began: Callable[[], None],
    ) -> None:
        self._listeners = [Listener(index, parameter) for index, parameter in enumerate(parameters)]
        self._wake = wake
        self._settled = settled
        self._filled = filled
        self._began = began
        self.noted: dict[int, Arrivals] = {}
        self.unexpected = Arrivals()

    def listen(self, buckets: Sequence[Sequence[int]], whole: Mapping[int, Sequence[int]], *, for_now: bool = False) -> None:
        """Hook parameters, after taking off all hooks from before.

        Args:
            buckets: the parameters in each, by index.
            whole: of each bucket that shall have one hook, by number, those parameters that get a gradient, the last one at the
                end. In other buckets each gradient is noted.
            for_now: whether it will not be so for long.
        """
        self.remove()
        for number, indices in enumerate(buckets):
            if number not in whole:
                self._note(number, indices, for_now=for_now)
                continue
            for index in set(indices).difference(whole[number]):
                self._listeners[index].note_in(self.unexpected, self._wake, for_now=True)
            self._listeners[whole[number][-1]].call(partial(self._filled, number))

    def begin_with(self, index: int) -> None:
        """Say so when the gradient of this parameter has come."""
        self._listeners[index].call(self._began)

    def follow(self, index: int) -> None:
        """From the next backward on, see to what waits as soon as all hooks on this parameter have run."""
        self._listeners[index].follow(self._settled)

    def remove(self) -> None:
        """Take all hooks off."""
        self.noted, self.unexpected = {}, Arrivals()
        for listener in self._listeners:
            listener.remove()

    def _note(self, number: int, indices: Sequence[int], *, for_now: bool = False) -> None:
        arrivals = self.noted[number] = Arrivals()
        for index in indices:
            self._listeners[index].note_in(arrivals, self._wake, for_now=for_now)
        self.follow(indices[-1])  # the last to arrive, as far as is known


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
        """Note the gradient there, and wake when that is worth a look; `for_now` takes longer, but leaves nothing behind."""
        note = _hook(self._index, arrivals, wake)
        if for_now:
            self._hook_node(lambda _, gradients: note(*gradients) if gradients[0] is not None else None)
        else:
            handle = self._parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def call(self, callback: Callable[[], None]) -> None:
        """From the next backward on, call back as soon as all hooks on this parameter have run."""
        self._hook_node(lambda *_: callback())

    def follow(self, callback: Callable[[], None]) -> None:
        """As `call`, once only, however often it is said."""
        if not self._follows:
            self._follows = True
            self.call(callback)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._node, self._follows = [], None, False

    def _hook_node(self, hook: Callable[..., None]) -> None:
        if self._node is None:
            # Held, because autograd makes a new node, without the hook, if nobody holds the old one.
            self._node = torch.autograd.graph.get_gradient_edge(self._parameter).node
        self._handles.append(self._node.register_hook(hook))


def _hook(index: int, arrivals: Arrivals, wake: Callable[[Arrivals], None]) -> Callable[[torch.Tensor], None]:
    indices, steps, add = arrivals.indices, arrivals.steps, arrivals.indices.append

    def note(_: torch.Tensor) -> None:
        add(index)
        if len(indices) in steps:
            wake(arrivals)

    return note
