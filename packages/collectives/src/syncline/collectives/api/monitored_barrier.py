"""A barrier whose error after a time-out names the missing ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch

from ..engine.cancel_scope import CancelScope, seconds
from ..engine.tags import MONITORED_BARRIER
from ..errors import CollectiveTimeout
from ..group import ProcessGroup
from ..work import Work
from .default_group import resolve_group

_NO_QUESTION = 0


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until all ranks have called this function. On a time-out, rank 0 raises an error that names the missing ranks.

    Use this function to find out which rank hangs or has ended. Do not call this slow function in every training step.

    Cost: 4 (`size` - 1) messages of 16 bytes, one after the other.

    After a time-out, ranks may call the function again, but not over Gloo, where a time-out ends the connections. A rank that
    still waits in its earlier call counts as present in rank 0's next call. A rank whose own call has timed out counts as
    missing until this rank calls the function again.

    Args:
        group: None means the default group.
        timeout: seconds or a timedelta; None takes the group's time limit.
        wait_all_ranks: if true, the error names all missing ranks; if false, only the first missing rank.

    Raises:
        CollectiveTimeout: on rank 0, some rank did not call this function in time; on another rank, rank 0 did not answer in
            time.
    """
    chosen = resolve_group(group)
    scope = CancelScope(seconds(timeout, chosen.timeout_s))
    messages = _messages.setdefault(chosen, _Messages())
    messages.call += 1
    if chosen.rank == 0:
        _collect(chosen, messages, scope, wait_all_ranks)
    else:
        _report(chosen, messages, scope)


class _Messages:
    """The messages between rank 0 and the other ranks of one group, and the state that one barrier leaves for the next.

    Note [Messages of the monitored barrier]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Each rank counts its calls. Rank 0 and one other rank exchange messages of two numbers: the number of the other rank's call,
    and the question. The question is the number of rank 0's call, or 0 for no question.

    1. A rank other than 0 calls the function, and sends (the number of its call, no question).
    2. When all ranks have come, rank 0 asks each rank whether it still waits: (the rank's call, the call of rank 0).
    3. A rank that still waits in this call sends the two numbers back. A rank whose call has timed out sends nothing. When
       such a rank calls the function again, it sends its new call's number, and rank 0 asks about the new call.
    4. When all ranks have answered, rank 0 sends each rank (the rank's call, no question), and the rank's call returns.

    Messages about other calls are left over from barriers that timed out, and are ignored.

    Attributes:
        call: how many barriers this rank has called.
        came: on rank 0, the latest call of each rank that has come and has not got the message of step 4.
    """

    def __init__(self) -> None:
        self.call = 0
        self.came: dict[int, int] = {}
        self._receives: dict[int, tuple[Work, torch.Tensor]] = {}

    def post(self, group: ProcessGroup, peer: int) -> Work:
        """Start to receive the peer's next message, or return the work of an earlier receive that is still open."""
        if peer not in self._receives:
            message = torch.zeros(2, dtype=torch.int64, device="cpu")
            self._receives[peer] = group.recv(message, peer, MONITORED_BARRIER, async_op=True), message
        return self._receives[peer][0]

    def receive(self, group: ProcessGroup, peer: int, scope: CancelScope) -> tuple[int, int]:
        self.post(group, peer).wait(max(scope.remaining_s(), 1e-3))
        call, question = self._receives.pop(peer)[1].tolist()
        return call, question


_messages: WeakKeyDictionary[ProcessGroup, _Messages] = WeakKeyDictionary()


def _collect(group: ProcessGroup, messages: _Messages, scope: CancelScope, wait_all_ranks: bool) -> None:
    """Do the steps of rank 0 in Note [Messages of the monitored barrier]."""
    others = range(1, group.size)
    sent: list[Work] = []

    def arrive(peer: int) -> None:
        # The rank may have come already, in a barrier that timed out.
        if peer not in messages.came:
            messages.came[peer] = messages.receive(group, peer, scope)[0]

    def ask(peer: int) -> None:
        sent.append(_send(group, peer, messages.came[peer], messages.call))

    def confirm(peer: int) -> None:
        while True:
            call, question = messages.receive(group, peer, scope)
            if (call, question) == (messages.came[peer], messages.call):
                return
            # The rank's call had timed out, and the rank has called again. See step 3 of the note.
            if call > messages.came[peer]:
                messages.came[peer] = call
                ask(peer)

    def all_do(step: Callable[[int], None]) -> None:
        missing = []
        for peer in others:
            try:
                step(peer)
            except CollectiveTimeout:
                missing.append(peer)
                # With `wait_all_ranks`, go on: a rank that has come is found at once, although the time limit is over.
                if not wait_all_ranks:
                    break
        if missing:
            raise _missing(group, missing, scope, wait_all_ranks)

    # Start all receives before the first wait. Then no rank's message has to wait until another rank has come.
    for peer in others:
        messages.post(group, peer)
    all_do(arrive)
    for peer in others:
        ask(peer)
    all_do(confirm)
    sent += [_send(group, peer, messages.came.pop(peer), _NO_QUESTION) for peer in others]
    for work in sent:
        work.wait()


def _missing(group: ProcessGroup, missing: Iterable[int], scope: CancelScope, wait_all_ranks: bool) -> CollectiveTimeout:
    ranks = [str(group.ranks[peer]) for peer in missing]
    return CollectiveTimeout(
        f"Rank {group.ranks[0]} timed out in monitoredBarrier on {group.place()} after {scope.timeout_s:g} s (timeout): "
        f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} failed to pass monitoredBarrier"
        + ("" if wait_all_ranks else " (others may be missing, too: pass wait_all_ranks=True)")
    )


def _report(group: ProcessGroup, messages: _Messages, scope: CancelScope) -> None:
    """Do the steps of a rank other than 0 in Note [Messages of the monitored barrier]."""
    sent = [_send(group, 0, messages.call, _NO_QUESTION)]
    try:
        while True:
            call, question = messages.receive(group, 0, scope)
            if call != messages.call:  # left over from a barrier that timed out
                continue
            if question == _NO_QUESTION:
                break
            sent.append(_send(group, 0, call, question))
    except CollectiveTimeout as error:
        raise CollectiveTimeout(
            f"Rank {group.ranks[group.rank]} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank {group.ranks[0]} on {group.place()}: no answer within {scope.timeout_s:g} s (timeout); if "
            "that rank came, it names those that did not"
        ) from error
    for work in sent:
        work.wait()


def _send(group: ProcessGroup, peer: int, call: int, question: int) -> Work:
    """Start to send a message. Keep the returned work until the barrier is over: Gloo may never send if the work is freed."""
    return group.send(torch.tensor([call, question], device="cpu"), peer, MONITORED_BARRIER, async_op=True)
