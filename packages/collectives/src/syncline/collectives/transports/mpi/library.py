"""The MPI library itself: its name, its errors as ours, our tags, and how a rank waits for it."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mpi4py import MPI

from ...engine.cancel_scope import CancelScope
from ...errors import TransportError
from .waiting import ARRIVAL_NAP_S, Patience

# Testing costs about 0.3 us; a small collective between ranks of a node is over after a few of them.
_TESTS_BEFORE_YIELDING = 50
# Over a network they cost more, 2 us with MPICH. Fewer lose time where the network brings 3 GB/s. With 50, four ranks on two
# cores, whose network brings 0.1 GB/s, took a fifth more of the processors.
_TESTS_BEFORE_NAPPING = 15


class Tag(enum.IntEnum):
    """The tags on a group's private communicator."""

    PAIRWISE = 1
    """`all_to_all`: the ranks' parts."""
    STATEMENTS = 2
    """`TimeoutReport`: what ranks wait for."""
    NOTHING = 3
    """Never sent: a probe for it lets MPI make progress."""
    LEAVING = 4
    """`LeaveNotices`: that ranks have left, and what they started before."""
    RING = 5
    """`RingAllReduce`: pieces of a part."""
    STATUS = 6
    """`MPIStatusPost`: what a rank has waited in for long."""
    GREETING = 7
    """`connect_neighbours`: nothing."""


def library_name() -> str:
    """The MPI library in a few words: "MPICH 5.0.2", "Open MPI 5.0.11"."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


@contextmanager
def mpi_errors() -> Iterator[None]:
    """Raise what MPI reports as a `TransportError`."""
    try:
        yield
    except MPI.Exception as error:
        raise mapped(error) from error


def mapped(error: MPI.Exception) -> TransportError:
    """An error of MPI as one of ours."""
    return TransportError(f"{library_name()} reported: {error.Get_error_string()}")


_calling = threading.Lock()
_is_over = False
_LONGEST_CALL_S = 1.0


@contextmanager
def while_mpi_runs() -> Iterator[bool]:
    """For a thread that looks now and then: whether MPI can be called, which stays so until the end of the context."""
    with _calling:
        yield not (_is_over or MPI.Is_finalized())


def no_more_mpi() -> None:
    """The program is ending MPI. A look that is under way gets `_LONGEST_CALL_S`, for MPI may hold it up until its end."""
    global _is_over
    _is_over = True
    if _calling.acquire(timeout=_LONGEST_CALL_S):
        _calling.release()


def translated(members: MPI.Group, whole: MPI.Group) -> list[int]:
    """The ranks that the members of one MPI group have in another; frees the first."""
    try:
        return [int(rank) for rank in MPI.Group.Translate_ranks(members, list(range(members.Get_size())), whole)]
    finally:
        members.Free()


def wait(
    request: MPI.Request,
    scope: CancelScope,
    status: MPI.Status | None = None,
    *,
    longest_nap_s: float = ARRIVAL_NAP_S,
    naps_at_once: bool = False,
) -> None:
    """Block until an MPI request is complete.

    It tests the request, a few times at once and then with rests between tests: with as many ranks as cores the backward pass
    runs on the same core as this thread. Measured on 2 cores (MPICH 5.0, 4 ranks, 4 B all_reduce): spinning 6,700 us,
    `time.sleep(0)` 340 us, yielding 40 us, MPI's own blocking call 36 us.

    Args:
        request: to wait for.
        scope: ends the wait.
        status: of the request.
        longest_nap_s: see `Patience`.
        naps_at_once: sleep from the first rest on. A rank that sleeps is sooner on its core again than one that has yielded,
            if others compute there, and leaves them more of it. For what a network brings as a single message; MPI libraries
            make progress only when asked, and a collective of theirs takes many steps.

    Raises:
        TimeoutError: the time limit was reached. The request stays active: MPI cannot withdraw a collective.
        BaseException: the scope's reason; the request stays active, too.
    """
    for _ in range(_TESTS_BEFORE_NAPPING if naps_at_once else _TESTS_BEFORE_YIELDING):
        if request.Test(status):
            return
    patience = Patience(scope, longest_nap_s, naps_at_once=naps_at_once)
    while not request.Test(status):
        patience.rest("MPI does not say which ranks do not take part")
