"""Buffers: when a wrapped module's replicas synchronise them, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from syncline.collectives import InvalidTypeError, ProcessGroup, broadcast_coalesced
from syncline.collectives.internal import bytes_of, in_plain_order, mark_written

from . import torch_internals
from .module_state import ModuleState, writable

if TYPE_CHECKING:
    AnyFuture: TypeAlias = torch.futures.Future[Any]
else:
    AnyFuture = torch.futures.Future


@dataclass(frozen=True)
class BufferHook:
    """What synchronises buffers instead of a broadcast.

    Attributes:
        state: the hook's first argument.
        hook: `hook(state, buffers)`, with a dict of the buffers by name, which it changes in place. It may return futures,
            which the end of the next backward waits for.
        follows_forward: whether it runs after the module's forward, or before.
    """

    state: Any
    hook: Callable[[Any, dict[str, torch.Tensor]], Sequence[AnyFuture] | None]
    follows_forward: bool

    def __post_init__(self) -> None:
        if not callable(self.hook):
            raise InvalidTypeError(f"expected a function hook(state, buffers), found {type(self.hook).__name__}")


class Buffers:
    """The buffers of a module, kept alike on all ranks.

    Args:
        state: knows them.
        enabled: whether forwards synchronise them at all.

    Attributes:
        enabled: the same.
        are_stale: whether the ranks may have different ones: a forward in training has written them.
        hook: synchronises them, instead of a broadcast; None for that.
    """

    def __init__(self, state: ModuleState, *, enabled: bool) -> None:
        self._state = state
        self.look_again()
        self.enabled = enabled
        self.are_stale = True
        self.hook: BufferHook | None = None

    def look_again(self) -> None:
        """The module may have buffers now, and had none before."""
        self._exist = bool(self._state.buffers())

    @property
    def are_due(self) -> bool:
        """Whether the next forward synchronises them."""
        return self.are_stale and self.enabled and self._exist

    def broadcast(self, group: ProcessGroup, root: int) -> None:
        """Give every rank the root's, in place. A collective."""
        buffers = [buffer for _, buffer in self._state.buffers()]
        only_reads = group.rank == root
        with nullcontext() if only_reads else self._seen_by_autograd_if_changed(buffers):
            broadcast_coalesced(writable(buffers), group=group, root=root)

    def before_forward(self, group: ProcessGroup, root: int) -> list[AnyFuture]:
        """Synchronise them if that is due, and not to be done after the forward.

        Returns:
            What is to be waited for, beside.
        """
        if not self.are_due or (self.hook is not None and self.hook.follows_forward):
            return []
        if self.hook is None:
            self.broadcast(group, root)
            return []
        return self._run(self.hook)

    def after_forward(self) -> list[AnyFuture]:
        """Synchronise them if that is due, and to be done after the forward; returns what is to be waited for, beside."""
        return self._run(self.hook) if self.hook is not None and self.hook.follows_forward and self.are_due else []

    def _run(self, hook: BufferHook) -> list[AnyFuture]:
        buffers = dict(self._state.buffers())
        with torch.no_grad(), self._seen_by_autograd_if_changed(list(buffers.values())):
            return list(hook.hook(hook.state, buffers) or ())

    @contextmanager
    def _seen_by_autograd_if_changed(self, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let graphs of earlier forwards live on, but not those whose backward would compute with other values.

        Such a graph may have saved any buffer. A write with the values that were there does no harm, and batch normalisation in
        training saves its statistics without reading them in backward. Autograd sees all other writes, and reports them in that
        backward. (Were it to see none, as under torch, gradients would be wrong without a word. Were it to see all, there could
        be no second forward before the first one's backward.)
        """
        unread = self._state.statistics_of_batch_normalization()
        others = [buffer for buffer in buffers if id(buffer) not in unread]
        before = [_bits(buffer).clone() for buffer in others]
        with torch_internals.preserve_versions(buffers):
            yield
        for buffer, bits in zip(others, before, strict=True):
            if not torch.equal(_bits(buffer), bits):
                mark_written(buffer)


def _bits(buffer: torch.Tensor) -> torch.Tensor:
    """To compare bits: a NaN that stays is no change."""
    return bytes_of(in_plain_order(buffer.detach()))
