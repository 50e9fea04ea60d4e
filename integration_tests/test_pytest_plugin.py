"""pytest under mpirun, with tests that fail and hang on purpose. Each test starts jobs of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_support.full_run import cases

pytestmark = pytest.mark.launch

PLUGIN = "syncline.collectives.testing.pytest_plugin"
HEADER = "import pytest, torch, time, sys\npytestmark = pytest.mark.mpi\n"


@pytest.fixture
def run_pytest(run_job, tmp_path: Path):
    def run(ranks: int, tests: str, *options: str):
        (tmp_path / "test_it.py").write_text(HEADER + tests)
        (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
        arguments = (
            "-m",
            "pytest",
            "-p",
            PLUGIN,
            "-p",
            "no:cacheprovider",
            "-p",
            "no:timeout",
            "--strict-markers",
            "--color=no",
            "-rN",  # no summary: under CI it repeats whole failures
        )
        # On a busy machine, ranks come to the end of a test or of the session one after the other.
        return run_job(ranks, "", *arguments, "-o", "mpi_patience_s=60", *options, "test_it.py")

    return run


def test_all_pass_and_only_rank_0_reports(run_pytest) -> None:
    job = run_pytest(
        2,
        """
def test_group(mpi_group):
    tensor = torch.ones(2)
    mpi_group.all_reduce(tensor)
    assert tensor.tolist() == [2, 2]

def test_world(world):
    from syncline.collectives import get_rank
    assert get_rank() == world.rank

def test_world_again(world):
    print("captured")

@pytest.mark.skip(reason="on all ranks")
def test_skipped(): ...

@pytest.mark.xfail(reason="on all ranks", strict=True)
def test_xfailed():
    assert False
""",
    )
    assert job.status == 0, job.output
    assert job.output.count("3 passed, 1 skipped, 1 xfailed") == 1
    assert job.output.count("test session starts") == 1
    assert "captured" not in job.output


def test_a_failure_on_one_rank_fails_the_test_on_all(run_pytest) -> None:
    job = run_pytest(
        3,
        """
def test_one(mpi_group):
    print(f"printed by {mpi_group.rank}")
    assert mpi_group.rank != 2, "this rank has it wrong"

def test_two(mpi_group):
    mpi_group.barrier()

def test_setup(mpi_group, broken): raise RuntimeError("not reached")

@pytest.fixture
def broken(mpi_group):
    if mpi_group.rank == 1:
        raise RuntimeError("the fixture fails")

def test_teardown(mpi_group, breaks_later): ...

@pytest.fixture
def breaks_later(mpi_group):
    yield
    if mpi_group.rank == 0:
        raise RuntimeError("the teardown fails")

def test_after_all(mpi_group, world):
    mpi_group.barrier()
    world.barrier()
""",
    )
    assert job.status == 1, job.output
    assert "failed on rank(s) 2 of 3" in job.output
    assert job.output.count("E       AssertionError: this rank has it wrong") == 1  # the summary repeats it on long lines
    assert "printed by 2" in job.output
    assert "printed by 1" not in job.output
    assert "failed on rank(s) 1 of 3" in job.output
    assert "the fixture fails" in job.output
    assert "not reached" not in job.output
    assert "the teardown fails" in job.output
    assert "1 failed, 3 passed, 2 errors" in job.output


def test_a_failure_while_the_others_wait_in_a_collective(run_pytest) -> None:
    """The limits of the test and of its collective are longer than the job may take."""
    job = run_pytest(
        2,
        """
def test_stuck(mpi_group):
    assert mpi_group.rank == 0, "rank 1 leaves the others alone"
    mpi_group.barrier()
""",
        *("-o", "mpi_patience_s=2", "-o", "mpi_limit_s=1000"),
    )
    assert job.status != 0
    assert "[rank 1 of 2] 2 s after this rank, not all others have come to: call of test_it.py::test_stuck" in job.output
    assert "rank 1 leaves the others alone" in job.output


def test_a_hang_ends_with_the_stack_of_the_rank_that_hangs(run_pytest) -> None:
    job = run_pytest(
        2,
        """
from mpi4py import MPI

def where_it_hangs():
    time.sleep(100)

def test_hangs():  # no group, because the time to connect it would count
    if MPI.COMM_WORLD.rank == 1:
        where_it_hangs()
""",
        "-o",
        "mpi_limit_s=3",
    )
    assert job.status != 0
    assert "[rank 1 of 2]: test_it.py::test_hangs took more than 3 s" in job.output
    assert "in where_it_hangs" in job.output


@pytest.mark.parametrize("outcome", cases(["pytest.skip('only here')"], in_full=["pytest.xfail('only here')"]))
def test_ranks_that_do_not_do_the_same(run_pytest, outcome: str) -> None:
    job = run_pytest(
        2,
        f"""
def test_differs(mpi_group):
    if mpi_group.rank == 1:
        {outcome}
""",
    )
    assert job.status == 1
    assert "the ranks did not do the same" in job.output
    assert "rank 1: skipped" in job.output


def test_ranks_that_collect_different_tests(run_pytest) -> None:
    job = run_pytest(
        2,
        """
import os
from syncline.collectives.startup.launch import detect_launch
if detect_launch(os.environ).rank == 1:
    def test_only_on_rank_1(): ...
def test_on_both(): ...
""",
    )
    assert job.status != 0
    assert "the ranks collected different tests (rank 0: 1, rank 1: 2)" in job.output


def test_the_error_of_a_rank_that_cannot_import_its_tests_is_printed(run_pytest) -> None:
    job = run_pytest(
        2,
        """
import os
if int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", 0))) == 1:
    raise ImportError("only here")
def test_on_one(): ...
""",
    )
    assert job.status != 0
    assert "the ranks collected different tests (rank 0: 1, rank 1: 0)" in job.output
    assert job.output.count("---- rank 1 of 2 ----") == 1
    assert "ImportError: only here" in job.output


def test_a_call_that_fails_after_the_last_test_fails_the_session(run_pytest) -> None:
    job = run_pytest(
        2,
        """
def test_leaves_a_call(mpi_group):
    if mpi_group.rank == 0:
        mpi_group.all_reduce(torch.ones(3), async_op=True)
    else:
        mpi_group.broadcast(torch.ones(3), 0, async_op=True)
""",
    )
    assert job.status == 1, job.output
    assert "mpi_group: calls that no test waited for" in job.output
    assert "failed on rank(s) 0, 1 of 2" in job.output
    assert "DisagreementError: all_reduce(float32[3], op=SUM)" in job.output


def test_a_call_on_one_rank_only_fails_the_session_with_its_own_error(run_pytest) -> None:
    """This rank closes its group only when its call has reached the time limit."""
    job = run_pytest(
        2,
        """
def test_leaves_a_call(mpi_group):
    if mpi_group.rank == 0:
        mpi_group.all_reduce(torch.ones(3), async_op=True)
""",
        "-o",
        "mpi_limit_s=24",
    )
    assert job.status == 1, job.output
    assert "failed on rank(s) 0 of 2" in job.output
    assert "CollectiveTimeout: all_reduce(float32[3], op=SUM)" in job.output


def test_the_exit_status_is_the_worst_of_all(run_pytest) -> None:
    """A rank that calls pytest.exit() is out of step with the others, which must not wait for it for ever."""
    job = run_pytest(
        2,
        """
def test_exit(mpi_group):
    if mpi_group.rank == 0:
        pytest.exit("enough", returncode=7)
""",
    )
    assert job.status != 0
    assert "out of step" in job.output
    assert "rank 0: the end of the session" in job.output


def test_maxfail_stops_all_ranks_alike(run_pytest) -> None:
    job = run_pytest(
        2,
        """
@pytest.mark.parametrize("n", range(5))
def test_some(mpi_group, n):
    assert (n, mpi_group.rank) != (2, 1)
""",
        "-x",
    )
    assert job.status == 1, job.output
    assert "1 failed, 2 passed" in job.output


def test_one_rank(run_pytest) -> None:
    job = run_pytest(1, "def test_it(mpi_group):\n    assert mpi_group.size == 1\n\ndef test_bad():\n    assert 1 == 2\n")
    assert job.status == 1
    assert "1 failed, 1 passed" in job.output
    assert "assert 1 == 2" in job.output
