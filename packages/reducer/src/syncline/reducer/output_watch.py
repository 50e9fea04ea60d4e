"""Backwards are seen where they begin: at the outputs of forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch

from .graph_task import current_task
from .weakly import weakly


class OutputWatch:
    """Tells of each backward that goes through outputs of any forward, as long as it was given those of all forwards.

    After a backward with `create_graph=True` it is blind: what was computed there leads to parameters past the outputs.

    Args:
        passed: called on the thread of backward when that comes to the first such output.

    Attributes:
        is_blind: whether there may be backwards that it does not see, for good.
    """

    def __init__(self, passed: Callable[[], None]) -> None:
        self._passed = passed
        self._prehook = weakly(self._pass)  # whoever keeps a loss keeps the hook
        self._key = object()
        self._awaits_outputs = False
        self._seen_task = -1
        self.is_blind = False

    def expect(self) -> None:
        """A forward begins, of which the outputs will be given."""
        self.is_blind |= self._awaits_outputs
        self._awaits_outputs = True

    def withdraw(self) -> None:
        """It failed and has no outputs."""
        self._awaits_outputs = False

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Its outputs. It is blind if there is none with a graph: then it is elsewhere what a loss is made of."""
        self._awaits_outputs = False
        nodes = set(_origins(outputs))
        self.is_blind |= not nodes or None in nodes
        for node in nodes:
            # Several forwards may return the same tensor.
            if node is not None and self._key not in (metadata := cast("dict[object, object]", node.metadata)):
                metadata[self._key] = None
                node.register_prehook(self._prehook)

    @property
    def has_seen(self) -> bool:
        """Whether the backward that runs now went through an output."""
        return self._seen_task == current_task()

    def lose_sight(self) -> None:
        """There are backwards that it does not see."""
        self.is_blind = True

    def _pass(self, *_: object) -> None:
        if self.has_seen:
            return
        self._seen_task = current_task()
        self.is_blind |= torch.is_grad_enabled()  # so it is in a backward with create_graph
        self._passed()


def _origins(outputs: Iterable[torch.Tensor]) -> Iterator[torch.autograd.graph.Node | None]:
    """The nodes that a backward from there goes through; None for a tensor that has none, as a parameter that is returned."""
    for tensor in outputs:
        if tensor.requires_grad:
            yield tensor.grad_fn
            # A view that is changed in place gets another node, which leads to that of the whole tensor.
            if tensor._is_view():
                yield None if tensor._base is None else tensor._base.grad_fn
