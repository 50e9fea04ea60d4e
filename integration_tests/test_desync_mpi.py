"""The desync catalogue over MPI: every disagreement of the ranks is reported to them.

Note [What a library does with garbled messages]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Between nodes small calls are not compared before they run. If the ranks then give the MPI library messages of different sizes
for each other, MPICH fails an assertion and ends the job, and Gloo ends the process. This is an error, but without a name, and
it would end this test run. So such programs run here in shared memory, with `check_calls`, and at a size that MPI's ranks
compare. At a small size and over Gloo they run in processes of their own (`test_desync_jobs.py`, `test_desync_gloo.py`).

Each program runs in a group of its own, because a failed group cannot be used again. The memory of a program that timed out
stays until the process ends, as it does in a job.
"""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from syncline.collectives.engine.host_group import HostGroup
from test_support.desync_programs import (
    LONG_TIMEOUT_S,
    NUMELS,
    QUICK,
    catalogue,
    outcome,
    problem,
    same_signature_swapped,
    time_limit_s,
)
from test_support.full_run import FULL

pytestmark = pytest.mark.mpi

PROGRAMS = catalogue()
NAMES = list(PROGRAMS) if FULL else QUICK
SIZES = (2, 3) if FULL else (2,)


class MakeGroup(Protocol):
    """Makes a group; the argument says whether each call is compared before it runs."""

    compares: bool

    def __call__(self, *, check_calls: bool) -> HostGroup: ...


def each_alone(communicator: Any) -> Any:
    """Every rank on a node of its own: without shared memory, so MPI does everything."""
    return communicator.Split(communicator.Get_rank(), 0)


@pytest.fixture(scope="module")
def job() -> Any:
    """All ranks, beside the groups under test."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_size() not in SIZES or "Intel" in MPI.get_vendor()[0]:
        pytest.skip(
            "disagreements are the same among more ranks, and Intel MPI's as MPICH's: run on two ranks, or three, of those"
        )
    return MPI.COMM_WORLD.Dup()


@pytest.fixture(params=["shared memory", "messages"])
def make_group(request: pytest.FixtureRequest, job: Any, monkeypatch: pytest.MonkeyPatch) -> MakeGroup:
    """Makes a group of all ranks, on one node or each on a node of its own."""

    from syncline.collectives.transports.mpi import neighbours

    monkeypatch.setattr(neighbours, "_LISTEN_S", 0.5)  # because many programs end in a time-out

    def make(*, check_calls: bool) -> HostGroup:
        from syncline.collectives.transports.mpi.node.node_transport import NodeTransport

        split = {"split": each_alone} if request.param == "messages" else {}
        return HostGroup(
            NodeTransport(job.Dup(), **split),
            job.Get_rank(),
            job.Get_size(),
            timeout_s=LONG_TIMEOUT_S,
            check_calls=check_calls,
        )

    make.compares = request.param == "shared memory"  # type: ignore[attr-defined]
    return make


def run(make_group: MakeGroup, job: Any, name: str, numel: int, *, check_calls: bool) -> None:
    group, compares = make_group(check_calls=check_calls), check_calls or make_group.compares
    group.set_timeout(time_limit_s(PROGRAMS[name], compares=compares))
    job.Barrier()
    said = job.allgather(outcome(group, PROGRAMS[name], numel))
    wrong = problem(PROGRAMS[name], said, compares=compares)
    assert wrong is None, f"{wrong}: {said}"


@pytest.mark.parametrize("size", list(NUMELS) if FULL else ["small"])
@pytest.mark.parametrize("name", NAMES)
def test_disagreement_is_told(make_group: MakeGroup, job: Any, name: str, size: str) -> None:
    if PROGRAMS[name].garbles and size == "small" and not make_group.compares:
        pytest.skip("the MPI library may end the job: see Note [What a library does with garbled messages]")
    run(make_group, job, name, NUMELS[size], check_calls=False)


@pytest.mark.parametrize("name", NAMES)
def test_disagreement_is_told_with_check_calls(make_group: MakeGroup, job: Any, name: str) -> None:
    run(make_group, job, name, NUMELS["small"], check_calls=True)


def test_calls_of_one_signature_that_are_swapped_are_not_seen(make_group: MakeGroup, job: Any) -> None:
    """The limit of detection; see Note [Verification of calls]."""
    group = make_group(check_calls=False)
    swapped = same_signature_swapped(group, group.rank == 1, 3)
    group.barrier()
    group.close()
    assert swapped != [group.size * 1.0, group.size * 10.0]
