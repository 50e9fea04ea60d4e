"""A collective in flight, as the watchdog sees it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ...engine.call import DONE, FAILED
from ...engine.cancel_scope import CancelScope
from ...errors import TransportError
from ...health.recorder import STATE, Entry
from .accelerator import Event
from .failure import Failure


class Description:
    """Says in words what a work is: with shape and dtype, until the tensor must be let go."""

    __slots__ = ("_call", "_name", "_place", "sequence")

    def __init__(self, call: Collective, sequence: int, place: Callable[[], str]) -> None:
        self._name = call.name
        self._call: Collective | None = call
        self.sequence = sequence
        self._place = place

    def __call__(self) -> str:
        """The words."""
        call = self._call
        signature = self._name if call is None else call.signature()
        return f"{signature}, number {self.sequence} on {self._place()}"

    def forget(self) -> None:
        """Let go of the tensor."""
        self._call = None


class Waiter(Protocol):
    """Who is to hear of a failure: the work."""

    def fail(self, failure: Failure) -> None:
        """Wake all who wait for it."""


class PendingCollective:
    """Holds the tensors of a collective until the GPU is done with them.

    Note [Memory in flight]
    ~~~~~~~~~~~~~~~~~~~~~~~
    The stream reads and writes the caller's tensors after the call has returned. torch's allocator would give their memory to
    the next tensor as soon as the caller drops them, so this object holds references, until

    1. the stream from which the collective was issued has been ordered after it (`wait`): then the collective is as good as a
       kernel of that stream, and what is freed there is reused in order; or
    2. the watchdog, or a thread that blocks, sees that the collective is over; or
    3. the group failed, and the communicators' kernels have left the GPU.

    The watchdog holds the `PendingCollective`, not the work, which keeps the outputs as its result. So once the work was waited
    for, memory is free as soon as the caller drops the work and the tensors. `record_stream` is not needed, and memory does not
    pile up behind it. Copies that a collective makes for itself are made on its own stream and need neither.

    Args:
        describe: says in words what it is.
        timeout_s: how long it may take, from now on.
        tensors: what it reads and writes.
        waiter: hears of a failure, as long as it lives.
    """

    __slots__ = ("_entries", "_event", "_held", "_waiter", "captured", "scope", "describe")

    def __init__(self, describe: Description, timeout_s: float, tensors: Sequence[torch.Tensor], waiter: Waiter) -> None:
        self.describe = describe
        self.scope = CancelScope(timeout_s)
        self.captured = False
        self._held = tuple(tensors)
        self._waiter = weakref.ref(waiter)
        self._entries: tuple[Entry, ...] = ()
        self._event: Event | None = None

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hold these: a batch is filled after its work was made."""
        self._held = tuple(tensors)

    def note_state_in(self, *entries: Entry) -> None:
        """Where the group's record says how it goes: of a batch, one entry for each call."""
        self._entries = entries

    def is_issued(self, event: Event, *, captured: bool) -> None:
        """It is on a stream, or was captured from there into a CUDA graph, and will be over at an event."""
        self._event, self.captured = event, captured
        if captured:
            self._note(DONE)

    def is_over(self) -> bool:
        """Whether the GPU is done with it. What was captured is: its event means nothing outside the graph.

        Raises:
            TransportError: the GPU faulted.
        """
        if self._event is None or self.captured:
            return self.captured
        try:
            is_over = self._event.is_over()
        except RuntimeError as error:
            raise gpu_fault(self.describe(), error) from error
        if is_over:
            self._note(DONE)
        return is_over

    def release(self) -> None:
        """Let go of the tensors."""
        self._held = ()
        self.describe.forget()

    def fail(self, failure: Failure) -> None:
        """Wake all who wait for it."""
        self._note(FAILED)
        waiter = self._waiter()
        if waiter is not None:
            waiter.fail(failure)

    def _note(self, state: str) -> None:
        """Once: what is over does not fail any more."""
        entries, self._entries = self._entries, ()
        for entry in entries:
            entry[STATE] = state


def gpu_fault(what: str, error: BaseException) -> TransportError:
    """The named error for one that torch raises of a GPU."""
    return TransportError(f"the GPU reported, while the group waited for {what}: {error}")
