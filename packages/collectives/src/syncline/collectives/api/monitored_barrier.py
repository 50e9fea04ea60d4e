"""A barrier that names the ranks that do not come."""

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
    """Return on any rank only after all have called it; on a time-out, rank 0 names the missing ranks, in torch's words.

    Rank 0 waits for a message of each rank in turn, asks each whether it still waits, then lets all go: four times `size` - 1
    messages of 16 bytes, one by one. Meant for finding faults, not for every step. After a time-out it may be called again,
    by all ranks or by some: a rank that has come meanwhile counts, and one that has given up does not. Over Gloo it may not,
    for there a time-out ends the connections.

    Args:
        group: the group, the default one if None.
        timeout: seconds or a timedelta; None takes the group's time limit.
        wait_all_ranks: name all missing ranks, rather than the first.

    Raises:
        CollectiveTimeout: on rank 0 it names the missing ranks; on the others it says that rank 0 did not answer.
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
    """Between rank 0 and the others of one group; what one barrier leaves for the next.

    Note [Messages of the monitored barrier]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Each rank counts its calls. A message is two numbers: a call of the rank that is not rank 0, and a question.

    1. A rank comes: (its call, no question).
    2. When all have come, rank 0 asks each whether it still waits: (that call, the call of rank 0).
    3. A rank that waits in that call sends the same back. One that has given up says nothing; if it calls again, it comes with
       another number, and rank 0 asks anew.
    4. When all have said so, rank 0 lets each go: (that call, no question).

    Messages about other calls are left over from barriers that timed out, and are ignored.

    Attributes:
        call: how many barriers this rank has called.
        came: on rank 0, for each rank that has come and was not let go, in which of its calls it came last.
    """

    def __init__(self) -> None:
        self.call = 0
        self.came: dict[int, int] = {}
        self._receives: dict[int, tuple[Work, torch.Tensor]] = {}

    def post(self, group: ProcessGroup, peer: int) -> Work:
        """The receive of this rank's next message. One that timed out is used again: it takes the next message in any case."""
        if peer not in self._receives:
            message = torch.zeros(2, dtype=torch.int64)
            self._receives[peer] = group.recv(message, peer, MONITORED_BARRIER, async_op=True), message
        return self._receives[peer][0]

    def receive(self, group: ProcessGroup, peer: int, scope: CancelScope) -> tuple[int, int]:
        """This rank's next message."""
        self.post(group, peer).wait(max(scope.remaining_s(), 1e-3))
        call, question = self._receives.pop(peer)[1].tolist()
        return call, question


_messages: WeakKeyDictionary[ProcessGroup, _Messages] = WeakKeyDictionary()


def _collect(group: ProcessGroup, messages: _Messages, scope: CancelScope, wait_all_ranks: bool) -> None:
    """Rank 0's part."""
    others = range(1, group.size)
    sent: list[Work] = []

    def arrive(peer: int) -> None:
        if peer not in messages.came:
            messages.came[peer] = messages.receive(group, peer, scope)[0]

    def ask(peer: int) -> None:
        sent.append(_send(group, peer, messages.came[peer], messages.call))

    def confirm(peer: int) -> None:
        while True:
            call, question = messages.receive(group, peer, scope)
            if (call, question) == (messages.came[peer], messages.call):
                return
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
                if not wait_all_ranks:
                    break
        if missing:
            raise _missing(group, missing, scope, wait_all_ranks)

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
    """The part of any other rank."""
    sent = [_send(group, 0, messages.call, _NO_QUESTION)]
    try:
        while True:
            call, question = messages.receive(group, 0, scope)
            if call != messages.call:
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
    """To be kept until the barrier is over: over Gloo, a send whose work is dropped may never leave."""
    return group.send(torch.tensor([call, question]), peer, MONITORED_BARRIER, async_op=True)
