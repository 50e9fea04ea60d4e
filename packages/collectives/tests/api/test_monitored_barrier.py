"""The monitored barrier after a time-out. With ranks as threads; over MPI in `integration_tests/test_functional_mpi.py`."""

from __future__ import annotations

import pytest
import torch

from syncline.collectives import CollectiveTimeout, ProcessGroup, monitored_barrier
from syncline.collectives.testing import run_ranks

pytestmark = pytest.mark.ranks


def test_a_rank_that_came_after_the_time_out_is_counted_once() -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            with pytest.raises(CollectiveTimeout, match="Ranks 1, 2 failed to pass"):
                monitored_barrier(group, 0.2, wait_all_ranks=True)
        group.barrier()
        monitored_barrier(group, 30)
        group.barrier()
        if group.rank == 0:
            with pytest.raises(CollectiveTimeout, match="Rank 1 failed to pass"):
                monitored_barrier(group, 0.2)
        group.barrier()

    run_ranks(3, body)


def test_a_rank_that_has_given_up_does_not_count_until_it_comes_again() -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 1:
            with pytest.raises(CollectiveTimeout, match="Rank 1 successfully reached"):
                monitored_barrier(group, 0.2)
        group.barrier()
        if group.rank == 0:
            with pytest.raises(CollectiveTimeout, match="Rank 1 failed to pass"):  # it came, and waits no more
                monitored_barrier(group, 0.2)
        group.barrier()
        monitored_barrier(group, 30)
        if group.rank == 0:
            with pytest.raises(CollectiveTimeout, match="Rank 1 failed to pass"):
                monitored_barrier(group, 0.2)
        group.barrier()

    run_ranks(2, body)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_ranks_that_try_until_all_are_there_meet(late: int) -> None:
    """Each rank tries with a short limit of its own; the late one starts when the others have failed."""

    def body(group: ProcessGroup) -> None:
        if group.rank != late:
            with pytest.raises(CollectiveTimeout):
                monitored_barrier(group, 0.1 * (1 + group.rank))
        group.barrier()
        monitored_barrier(group, 30)
        monitored_barrier(group, 30)

    run_ranks(3, body)


def test_torchs_default_device_does_not_matter() -> None:
    def body(group: ProcessGroup) -> None:
        with torch.device("meta"):
            monitored_barrier(group, 30)

    run_ranks(2, body)
