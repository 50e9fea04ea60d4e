"""A barrier that names the ranks that do not come."""

from __future__ import annotations

from datetime import timedelta

import torch

from ..contract.deadline import Deadline, seconds
from ..contract.process_group import ProcessGroup
from ..errors import CollectiveTimeout
from .default_group import resolve_group

# Messages of the barrier; other users of send and recv should not take this tag.
_TAG = 32_765


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Return on any rank only after all have called it; on a time-out, rank 0 names the missing ranks, in torch's words.

    Rank 0 waits for a message of each rank in turn, then answers all: twice `size` - 1 messages of one byte, one by one. Meant
    for finding faults, not for every step.

    Args:
        group: the group, the default one if None.
        timeout: seconds or a timedelta; None takes the group's time limit.
        wait_all_ranks: name all missing ranks, rather than the first.

    Raises:
        CollectiveTimeout: on rank 0 it names the missing ranks; on the others it says that rank 0 did not answer.
    """
    chosen = resolve_group(group)
    deadline = Deadline(seconds(timeout, chosen.timeout_s))
    if chosen.rank == 0:
        _collect(chosen, deadline, wait_all_ranks)
    else:
        _report(chosen, deadline)


def _collect(group: ProcessGroup, deadline: Deadline, wait_all_ranks: bool) -> None:
    arrivals = {peer: group.recv(_byte(), peer, _TAG, async_op=True) for peer in range(1, group.size)}
    missing = []
    for peer, work in arrivals.items():
        try:
            work.wait(max(deadline.remaining_s(), 1e-3))
        except CollectiveTimeout:
            missing.append(peer)
            if not wait_all_ranks:
                break
    if missing:
        named = ", ".join(str(group.ranks[peer]) for peer in missing)
        raise CollectiveTimeout(
            f"Rank {group.ranks[0]} timed out in monitoredBarrier on {group.place()} after {deadline.timeout_s:g} s (timeout): "
            f"Rank{'s' if len(missing) > 1 else ''} {named} failed to pass monitoredBarrier"
            + ("" if wait_all_ranks else " (others may be missing, too: pass wait_all_ranks=True)")
        )
    for peer in arrivals:
        group.send(_byte(), peer, _TAG)


def _report(group: ProcessGroup, deadline: Deadline) -> None:
    arrival = group.send(_byte(), 0, _TAG, async_op=True)  # kept: over Gloo, a send whose work is dropped may never leave
    try:
        group.recv(_byte(), 0, _TAG, async_op=True).wait(max(deadline.remaining_s(), 1e-3))
    except CollectiveTimeout as error:
        raise CollectiveTimeout(
            f"Rank {group.ranks[group.rank]} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank {group.ranks[0]} on {group.place()}: no answer within {deadline.timeout_s:g} s (timeout); if "
            "that rank came, it names those that did not"
        ) from error
    arrival.wait()


def _byte() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)
