"""Checks that end their group: `close`, the time limit, and calls that differ between ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...errors import CollectiveTimeout, DisagreementError, GroupClosedError, TransportError
from ...group import ProcessGroup
from ...work import Work
from .values import Check, CheckError, expect, expect_raises, sum_of_terms, terms

# The limit of rank 1, and of the other ranks.
_LIMIT_S, _LONGER_LIMIT_S = 0.5, 3.0
# How much later than the limit a call may end. A library may notice the limit late, and the machine may be busy.
_GRACE_S = 20.0
#: The collectives whose time limit the checks test.
LIMITED = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "barrier")


def after_close(group: ProcessGroup) -> None:
    """Check that `close` finishes collectives in flight, and that the group then refuses collectives.

    A second `close` must do nothing. This check leaves the group closed.
    """
    tensor = terms((1001,), group.rank)
    work = group.all_reduce(tensor, async_op=True)
    group.close()
    work.wait()
    expect(tensor, sum_of_terms((1001,), group.size), "all_reduce in flight at close")
    group.close()
    calls: tuple[tuple[str, Callable[[], Work]], ...] = (
        ("all_reduce", partial(group.all_reduce, tensor)),
        ("broadcast", partial(group.broadcast, tensor)),
        ("all_gather", partial(group.all_gather, [torch.empty_like(tensor) for _ in range(group.size)], tensor)),
        ("barrier", group.barrier),
    )
    for name, call in calls:
        expect_raises(GroupClosedError, call, f"{name} after close", name)


def at_the_time_limit(name: str, group: ProcessGroup) -> None:
    """Check that a call ends at its time limit if no other rank takes part. This check leaves the group aborted.

    Rank 1 makes the call with this name. The other ranks wait longer, for a message that rank 1 does not send.
    """
    if group.size == 1:
        return
    group.barrier()  # a library may connect the ranks at their first call, which may take longer than the limit
    is_first = group.rank == 1
    group.set_timeout(_LIMIT_S if is_first else _LONGER_LIMIT_S)
    if not is_first:
        name = "recv"
    # `HostGroup` compares the splits before an all-to-all. Without the other ranks, the call would end in this comparison, and
    # never reach the transport.
    vars(group)["_check_same_splits"] = lambda _: None
    work = _waiting_call(name, group)
    future = work.get_future()
    end_s = time.monotonic() + _LONGER_LIMIT_S + _GRACE_S
    while not future.done():  # `wait` might never return
        if time.monotonic() > end_s:
            raise CheckError(f"expected {name} to end at its time limit of {group.timeout_s} s, but it still waits")
        time.sleep(0.01)
    try:
        # The failure of rank 1 may end the other ranks' calls before their limit.
        expect_raises(CollectiveTimeout if is_first else TransportError, work.wait, f"{name}, which has no counterpart")
    except TransportError as error:
        limit_s = group.timeout_s
        raise CheckError(f"expected {name} to end at its time limit of {limit_s} s, found a later end: {error}") from error
    group.abort()


def _waiting_call(name: str, group: ProcessGroup) -> Work:
    """Start a call on rank 1 that cannot end without the other ranks, or, with the name "recv", a receive from rank 1."""
    tensor, rows = torch.zeros(3), [torch.zeros(3) for _ in range(group.size)]
    if name == "recv":
        return group.recv(tensor, 1, async_op=True)
    if name == "barrier":
        return group.barrier(async_op=True)
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (tensor,),
        "broadcast": (tensor, 0),
        "reduce": (tensor, 1),
        "all_gather": (rows, tensor),
        "gather": (tensor, rows, 1),
        "scatter": (tensor, None, 0),
        "reduce_scatter": (tensor, rows),
        "all_to_all": ([torch.zeros(3) for _ in rows], rows),
    }
    work: Work = getattr(group, name)(*arguments[name], async_op=True)
    return work


def after_different_calls(group: ProcessGroup) -> None:
    """Check that ranks that make different calls get an error, in the next barrier at the latest.

    The calls differ only in their marks (see `ProcessGroup.marked`), so a library such as MPI can still carry out the calls.
    This check leaves the group aborted.
    """
    if group.size == 1:
        return

    def calls() -> None:
        with group.marked("one of two calls" if group.rank == 0 else "another call"):
            group.all_reduce(torch.zeros(3))
        group.barrier()

    expect_raises(DisagreementError, calls, "all_reduce with different marks, then barrier")
    group.abort()


ENDINGS: dict[str, Check] = {
    "refuses calls after close": after_close,
    **{f"ends {name} at the time limit": partial(at_the_time_limit, name) for name in LIMITED},
    "notices different calls": after_different_calls,
}
