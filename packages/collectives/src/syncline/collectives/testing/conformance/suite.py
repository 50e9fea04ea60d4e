"""The conformance checks, and a function that runs them all.

The author of a backend calls `run_conformance` on every rank, with a function that makes a group::

    run_conformance(lambda: load_backend("mine").connect(request))

Each check can also be a separate test: ``@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)``.
"""

from __future__ import annotations

from collections.abc import Callable

from ...group import ProcessGroup
from . import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    coalesced,
    in_flight,
    objects,
    point_to_point,
    random_calls,
    refusals,
    rooted,
    scattered,
    sparse,
    subgroups,
    total_order,
)
from .endings import ENDINGS
from .values import Check as Check
from .values import CheckError

#: All checks, by name. Call a check on every rank, with that rank's group. The group may have any size. A check raises an error
#: if something is wrong. After a check without an error, the group is still usable. A check makes its tensors on torch's
#: default device. For a group that serves GPUs, call the check inside `with torch.device("cuda"):`.
CHECKS: dict[str, Check] = {
    **all_reduce.CHECKS,
    **broadcast.CHECKS,
    **all_gather.CHECKS,
    **rooted.CHECKS,
    **scattered.CHECKS,
    **all_to_all.CHECKS,
    **point_to_point.CHECKS,
    **sparse.CHECKS,
    **subgroups.CHECKS,
    **barrier.CHECKS,
    **in_flight.CHECKS,
    **total_order.CHECKS,
    **refusals.CHECKS,
    **coalesced.CHECKS,
    **objects.CHECKS,
    **random_calls.CHECKS,
}


def run_conformance(make_group: Callable[[], ProcessGroup]) -> None:
    """Check that the groups of a backend behave as Syncline requires. Every rank must call this function.

    Each check gets a new group, which is closed afterwards.

    Args:
        make_group: returns a new group of the same ranks. All ranks call `make_group` together, so this function may
            communicate.

    Raises:
        CheckError: a check failed. The message names the check, and `__cause__` is the check's error. The group was aborted.
    """
    for name, check in {**CHECKS, **ENDINGS}.items():
        group = make_group()
        try:
            check(group)
            group.close()
        except Exception as error:
            group.abort()
            raise CheckError(f"conformance check '{name}' failed on {group.place()}: {error}") from error
