"""Checks of barrier: no rank leaves the barrier before every rank has come."""

from __future__ import annotations

import random
import socket
import time

from ...api.object_exchange import exchange_objects
from ...group import ProcessGroup
from .values import Check, CheckError, expect, expect_equal, sum_of_terms, terms


def waits_for_all(group: ProcessGroup) -> None:
    """Check, by the node's clock, that no rank leaves a barrier before the last rank has come.

    On several nodes, this check always passes.
    """
    jitter = random.Random(group.rank)
    stamps = []
    for round_number in range(20):
        if round_number % group.size == group.rank:
            time.sleep(jitter.uniform(0.0, 0.005))  # in each round another rank is late
        came = time.monotonic()
        group.barrier(async_op=round_number % 2 == 0).wait()
        stamps.append((came, time.monotonic()))
    others = exchange_objects((socket.gethostname(), stamps), group=group)
    if len({host for host, _ in others}) > 1:
        return
    for round_number in range(20):
        last_came_s = max(theirs[round_number][0] for _, theirs in others)
        left_s = [theirs[round_number][1] for _, theirs in others]
        if min(left_s) < last_came_s:
            early = left_s.index(min(left_s))
            raise CheckError(
                f"barrier {round_number}: rank {early} left {last_came_s - min(left_s):.6f} s before the last came"
            )


def between_other_collectives(group: ProcessGroup) -> None:
    """Check a barrier between other collectives. A barrier has no tensor, so its result is empty."""
    before, after = terms((3,), group.rank), terms((4,), group.rank)
    first = group.all_reduce(before, async_op=True)
    second = group.barrier(async_op=True)
    third = group.all_reduce(after, async_op=True)
    for work in (third, second, first):
        work.wait()
    expect_equal(second.result(), [], "result() of a barrier")
    expect(before, sum_of_terms((3,), group.size), "all_reduce before a barrier")
    expect(after, sum_of_terms((4,), group.size), "all_reduce after a barrier")


CHECKS: dict[str, Check] = {
    "barrier_waits_for_all": waits_for_all,
    "barrier_between_other_collectives": between_other_collectives,
}
