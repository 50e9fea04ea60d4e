"""Jobs that start in unusual ways get their ranks, or a sentence that says what is wrong. Each test starts its own jobs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import mpi_runtimes
from commands import ToolError
from test_support.full_run import cases
from test_support.jobs import LIMIT_S, Finished, finished, ranks_logs

pytestmark = pytest.mark.launch

RunOn = Callable[..., Finished]


@pytest.fixture
def run_on(tmp_path: Path, preloaded: list[str]) -> RunOn:
    """Run a script on N ranks of a named MPI; skips if this machine does not have it."""

    def run(mpi: str, ranks: int, script: str, *, plain: bool = False, **variables: str) -> Finished:
        try:
            runtime = mpi_runtimes.find(mpi)
        except ToolError as error:
            pytest.skip(str(error))
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        # The preloaded Python has loaded MPICH's library, and needs a descriptor that only MPICH's launcher passes on.
        python = preloaded if mpi == "mpich" and not plain else [sys.executable]
        environ = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **runtime.env, **variables}
        with ranks_logs(python) as (python, logs):
            return finished([*runtime.command(ranks), *python, str(path)], tmp_path, LIMIT_S, environ, logs)

    return run


MPIS = ("mpich", "openmpi")
# A rank of Open MPI loads torch anew: ten times as long as a fork.
CASES = cases(["mpich"], in_full=["openmpi"])


# ---- the first meeting ----


@pytest.mark.parametrize("mpi", CASES)
def test_a_rank_that_does_not_come_is_named_in_a_warning_and_then_in_an_error(run_on: RunOn, tmp_path: Path, mpi: str) -> None:
    """Rank 0 has started MPI, and serves data."""
    (tmp_path / "site.toml").write_text("stall_warning_s = 0.5")
    job = run_on(
        mpi,
        3,
        """
        import logging, sys, time
        from mpi4py import MPI
        from syncline.collectives import init_process_group
        logging.basicConfig(level=logging.WARNING)
        world = MPI.COMM_WORLD
        others = world.Split(world.rank == 0)
        if world.rank == 0:
            world.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)  # must receive no message of Syncline's
            sys.exit("a message came")
        others.Barrier()  # each of them begins in time
        init_process_group(timeout=3)
        """,
        SYNCLINE_SITE=str(tmp_path / "site.toml"),
    )
    assert job.status != 0
    first = "not all ranks called init_process_group within 3 s (timeout): rank 0 did not\n"
    assert f"CollectiveTimeout: {first}" in job.output, job.output
    assert "init_process_group(communicator=...)" in job.output
    assert "of 3 waits for 0.5 s and more in the first meeting of all ranks" in job.output
    # On a busy machine, a rank may warn before the other one has come, too.
    assert re.search(r"\(ranks? 0(, [12])? did not\)", job.output), job.output
    assert "a message came" not in job.output
    assert 'script.py", line 12, in <module>' in job.output
    assert "connection.py" not in job.output, "the error goes on where its reader cannot help"


def test_in_a_large_job_the_block_of_the_missing_rank_names_it(run_on: RunOn) -> None:
    """Blocks of two ranks here. All ranks say what they know, and then end together."""
    job = run_on(
        "mpich",
        5,
        """
        import os
        from pathlib import Path
        from mpi4py import MPI
        from syncline.collectives import CollectiveTimeout, init_process_group
        from syncline.collectives.transports.mpi import connection

        connection._BLOCK_RANKS = 2
        rank = MPI.COMM_WORLD.rank
        others = MPI.COMM_WORLD.Split(rank == 3)
        if rank != 3:
            others.Barrier()  # each of them begins in time
            try:
                init_process_group(timeout=2)
            except CollectiveTimeout as error:
                print(f"{rank}:{str(error).splitlines()[0].partition('(timeout):')[2]}\\n", end="", flush=True)
        Path(f"{rank} is done").touch()
        while not all(Path(f"{other} is done").exists() for other in range(5)):
            pass
        os._exit(0)
        """,
    )
    assert sorted(line for line in job.output.splitlines() if ": " in line and line[0].isdigit()) == [
        "0: ranks 0, 1 came; the output of other ranks names the missing ranks",
        "1: ranks 0, 1 came; the output of other ranks names the missing ranks",
        "2: rank 3 did not",
        "4: rank 4 came; the output of other ranks names the missing ranks",
    ], job.output


def test_who_calls_again_goes_on_with_the_same_meeting(run_on: RunOn) -> None:
    """MPI cannot cancel a collective, so a late rank still finds the messages of the first call."""
    job = run_on(
        "mpich",
        2,
        """
        from pathlib import Path
        from mpi4py import MPI
        import torch
        from syncline.collectives import CollectiveTimeout, all_reduce, destroy_process_group, init_process_group

        rank, gave_up = MPI.COMM_WORLD.rank, Path("gave up")
        if rank == 1:
            while not gave_up.exists():
                pass
        else:
            try:
                init_process_group(timeout=0.5)
            except CollectiveTimeout:
                gave_up.touch()
        init_process_group(timeout=60)
        tensor = torch.tensor([rank + 1.0, 10.0 * (rank + 1)])
        all_reduce(tensor)
        print(f"{tensor.tolist()}\\n", end="")
        destroy_process_group()
        """,
    )
    assert job.status == 0, job.output
    assert job.output.splitlines() == ["[3.0, 30.0]"] * 2


@pytest.mark.parametrize("mpi", CASES)
def test_ranks_of_different_versions_are_named(run_on: RunOn, mpi: str) -> None:
    job = run_on(
        mpi,
        3,
        """
        from mpi4py import MPI
        from syncline.collectives import version
        if MPI.COMM_WORLD.rank == 1:
            version.__version__ = "0.0.9"
        from syncline.collectives import init_process_group
        init_process_group(timeout=60)
        """,
    )
    assert job.status != 0
    said = [
        line for line in job.output.splitlines() if "DisagreementError: the ranks run different versions of Syncline: " in line
    ]
    assert said, job.output
    assert all("ranks 0, 2: " in line and "; rank 1: 0.0.9. Install the same on every node" in line for line in said)


@pytest.mark.parametrize("mpi", CASES)
def test_a_process_that_never_starts_mpi_is_no_wait_without_end(run_on: RunOn, mpi: str) -> None:
    job = run_on(
        mpi,
        2,
        """
        import os, time
        from syncline.collectives import init_process_group
        if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
            time.sleep(600)  # ended by mpiexec
        init_process_group(timeout=1)
        """,
    )
    assert job.status != 0
    assert (
        "rank 0 of 2 was not connected within 1 s (timeout); it is in MPI_Init: a process of the job has not started MPI"
        in (job.output)
    ), job.output


# ---- a part of a job's ranks ----


@pytest.mark.parametrize("mpi", CASES)
def test_a_communicator_says_which_ranks_train(run_on: RunOn, mpi: str) -> None:
    """Rank 1 meanwhile serves data over MPI_COMM_WORLD. The ranks of the group count from 0."""
    job = run_on(
        mpi,
        4,
        """
        from mpi4py import MPI
        import torch
        from syncline.collectives import all_reduce, destroy_process_group, get_rank, init_process_group, new_group

        world = MPI.COMM_WORLD
        trains = world.rank != 1
        trainers = world.Split(0 if trains else MPI.UNDEFINED)
        if trains:
            group = init_process_group(communicator=trainers, timeout=60)
            world.send(world.rank, dest=1, tag=7)
            data = torch.full((3,), float(world.recv(source=1)))
            all_reduce(data)
            pair = new_group([0, 2])
            if get_rank() != 1:
                pair.all_reduce(data)
            print(f"rank {group.rank} of {group.size}, {world.rank} of MPI: {data.tolist()}\\n", end="")
            destroy_process_group()
        else:
            for _ in range(3):
                asking = world.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
                world.send(10 ** asking, dest=asking)
        """,
    )
    assert job.status == 0, job.output
    assert sorted(job.output.splitlines()) == [
        "rank 0 of 3, 0 of MPI: [2202.0, 2202.0, 2202.0]",
        "rank 1 of 3, 2 of MPI: [1101.0, 1101.0, 1101.0]",
        "rank 2 of 3, 3 of MPI: [2202.0, 2202.0, 2202.0]",
    ]


def test_gloo_and_several_communicators_one_after_the_other(run_on: RunOn) -> None:
    job = run_on(
        "mpich",
        3,
        """
        from mpi4py import MPI
        import torch
        from syncline.collectives import LaunchError, all_reduce, destroy_process_group, init_process_group

        world, found = MPI.COMM_WORLD, []
        evens = world.Split(world.rank % 2)
        for communicator, backend in ((evens, None), (world, None), (evens, "gloo"), (evens, "mpi")):
            group = init_process_group(backend, communicator=communicator, timeout=60)
            tensor = torch.tensor([1.0 + world.rank])
            all_reduce(tensor)
            found.append((group.backend_name, group.size, tensor.item()))
            destroy_process_group()
        try:
            init_process_group(communicator=evens, world_size=3)
        except LaunchError as error:
            assert "world_size=3 was asked for" in str(error), error
        else:
            assert world.rank == 7
        print(f"{world.rank}: {found}\\n", end="")
        """,
    )
    assert job.status == 0, job.output
    even, odd = [4.0, 6.0, 4.0, 4.0], [2.0, 6.0, 2.0, 2.0]
    names = ["mpi", "mpi", "gloo", "mpi"]
    expected = [list(zip(names, (size, 3, size, size), sums, strict=True)) for size, sums in ((2, even), (1, odd), (2, even))]
    assert sorted(job.output.splitlines()) == [f"{rank}: {found}" for rank, found in enumerate(expected)]


# ---- the end of MPI ----


@pytest.mark.parametrize("mpi", CASES)
def test_a_program_that_ends_mpi_closes_its_groups_and_goes_on(run_on: RunOn, tmp_path: Path, mpi: str) -> None:
    """Also with groups made from others, and while threads that check now and then do so every few milliseconds."""
    (tmp_path / "site.toml").write_text("stall_warning_s = 0.05")
    job = run_on(
        mpi,
        2,
        """
        import time
        from mpi4py import MPI
        import torch
        from syncline.collectives import GroupClosedError, all_reduce, init_process_group
        from syncline.collectives.transports.mpi.job_abort import ExitBarrier
        from syncline.collectives.transports.mpi.library import while_mpi_runs

        ExitBarrier.period_s = 0.05
        group = init_process_group(timeout=60)
        pair = group.split(0)
        tensor = torch.ones(20000) * (group.rank + 1)
        pair.all_reduce(tensor)
        MPI.Finalize()
        for call in (all_reduce, pair.all_reduce):
            try:
                call(torch.ones(3))
            except GroupClosedError:
                tensor += 1
        time.sleep(0.3)  # time for some more checks
        with while_mpi_runs() as runs:
            assert not runs
        print(f"{tensor[0].item()} after the end of MPI\\n", end="")
        """,
        SYNCLINE_SITE=str(tmp_path / "site.toml"),
    )
    assert job.status == 0, job.output
    assert job.output.count("5.0 after the end of MPI\n") == 2, job.output


def test_ending_mpi_closes_all_groups_although_a_call_has_failed_unseen(run_on: RunOn) -> None:
    job = run_on(
        "mpich",
        2,
        """
        import time
        from mpi4py import MPI
        import torch
        from syncline.collectives import init_process_group

        def broken(signature):
            raise MemoryError

        group = init_process_group(timeout=60)
        pair = group.split(0)
        pair._transport.plan = broken
        work = pair.all_reduce(torch.ones(3), async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
        MPI.Finalize()
        try:
            group.barrier()
        except RuntimeError as error:
            print(f"{error}\\n", end="")
        """,
    )
    assert job.status == 0, job.output
    assert job.output.count("the group is closed") == 2, job.output
    assert "MemoryError" not in job.output


def test_a_rank_that_ends_mpi_waits_for_those_who_train_and_fails_who_waits_for_it(run_on: RunOn) -> None:
    job = run_on(
        "mpich",
        2,
        """
        from mpi4py import MPI
        import torch
        from syncline.collectives import RankLostError, all_reduce, init_process_group

        group = init_process_group(timeout=60)
        all_reduce(torch.ones(3))
        if group.rank == 1:
            MPI.Finalize()
        else:
            try:
                all_reduce(torch.ones(3))
            except RankLostError as error:
                print(error)
        """,
    )
    assert "rank(s) 1 of the job left without taking part" in job.output, job.output


def test_exit_ends_the_job_with_its_status(run_on: RunOn) -> None:
    job = run_on(
        "mpich",
        2,
        """
        from syncline.collectives import init_process_group
        group = init_process_group(timeout=60)
        if group.rank == 1:
            exit(7)
        group.barrier()
        """,
    )
    assert job.status == 7, job.output
    assert "rank 1 of 2" in job.output
    assert "exits with status 7 and ends the job" in job.output


@pytest.mark.parametrize("ends", ["MPI.Finalize()", "sys.exit()"])
def test_ctrl_c_while_a_rank_waits_for_the_others_at_exit_ends_the_job(run_on: RunOn, ends: str) -> None:
    job = run_on(
        "mpich",
        2,
        f"""
        import os, signal, sys, time
        from mpi4py import MPI
        import torch
        from syncline.collectives import RankLostError, all_reduce, init_process_group

        group = init_process_group(timeout=60)
        process = MPI.COMM_WORLD.bcast(os.getpid())
        all_reduce(torch.ones(3))
        if group.rank == 0:
            {ends}
        try:
            all_reduce(torch.ones(3))
        except RankLostError:  # rank 0 waits now
            os.kill(process, signal.SIGINT)
        time.sleep({LIMIT_S / 2})
        """,
    )
    assert job.status == 130, job.output
    assert "rank 0 of 2" in job.output
    assert "interrupted while it waited for the other ranks at exit, and ends the job: KeyboardInterrupt" in job.output


def test_a_second_ctrl_c_does_not_keep_a_rank_from_ending_the_job(run_on: RunOn) -> None:
    job = run_on(
        "mpich",
        2,
        """
        from syncline.collectives import init_process_group
        from syncline.collectives.startup import mpi_library

        class Impatient:
            def sleep(self, _):
                raise KeyboardInterrupt

        group = init_process_group(timeout=60)
        if group.rank == 1:
            mpi_library.time = Impatient()
            raise KeyboardInterrupt
        group.barrier()
        """,
    )
    assert job.status == 130, job.output


# ---- a child of a rank ----


@pytest.mark.parametrize("mpi", CASES)
def test_a_child_of_a_rank_is_told_what_to_do_and_its_parent_goes_on(run_on: RunOn, python: list[str], mpi: str) -> None:
    """MPICH would end the job, and Open MPI would wait for ever."""
    job = run_on(
        mpi,
        2,
        """
        import os, shlex, subprocess, sys
        import torch
        from syncline.collectives import LaunchError, all_reduce, init_process_group

        if len(sys.argv) > 1:
            try:
                group = init_process_group(sys.argv[1], **eval(sys.argv[2]), timeout=60)
            except LaunchError as error:
                print("child:", str(error).splitlines()[0])
            else:
                tensor = torch.tensor([group.rank + 1.0])
                all_reduce(tensor)
                print("child:", group.rank, "of", group.size, "has", tensor.item())
            sys.exit()
        group = init_process_group(timeout=60)

        def start(*words):
            command = [*shlex.split(os.environ["CHILD"]), __file__, *words]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, close_fds=False)

        if group.rank == 1:
            children = [start("mpi", "{}"), start("gloo", "{}"), start("mpi", "dict(rank=0, world_size=1)")]
            meeting = f"init_method='file://{__file__}.folder', world_size=2"
            children += [start("gloo", f"dict({meeting}, rank={rank})") for rank in range(2)]
            children.append(start("in_process", "dict(rank=0, world_size=1)"))
            print("".join(child.communicate()[0] for child in children), end="")
        tensor = torch.tensor([group.rank + 1.0])
        all_reduce(tensor)
        print(f"parent: {tensor.item()}\\n", end="")
        """,
        CHILD=shlex.join(python),
    )
    assert job.status == 0, job.output
    lines = job.output.splitlines()
    refused = [line for line in lines if "this process is a child of" in line]
    assert len(refused) == 3, job.output
    assert all("pass rank, world_size and init_method for a group of its own" in line for line in refused)
    assert sorted(line for line in lines if line.startswith(("child", "parent")) and line not in refused) == [
        "child: 0 of 1 has 1.0",
        "child: 0 of 2 has 3.0",
        "child: 1 of 2 has 3.0",
        "parent: 3.0",
        "parent: 3.0",
    ]


# ---- what is there before MPI starts ----


def test_the_users_faulthandler_is_left_alone(run_on: RunOn) -> None:
    job = run_on(
        "mpich",
        2,
        """
        import faulthandler, time
        from pathlib import Path
        from syncline.collectives import init_process_group
        with open(f"stack {time.monotonic_ns()}", "w") as file:
            faulthandler.dump_traceback_later(2, file=file)
            group = init_process_group(timeout=60)
            end_s = time.monotonic() + 30
            while not Path(file.name).stat().st_size and time.monotonic() < end_s:
                pass
        print(f"fired: {'Timeout' in Path(file.name).read_text()}\\n", end="")
        """,
    )
    assert job.output.splitlines() == ["fired: True"] * 2


def test_the_users_handler_of_sighup_is_left_alone(run_on: RunOn) -> None:
    job = run_on(
        "mpich",
        2,
        """
        import os, signal
        from syncline.collectives import init_process_group
        signal.signal(signal.SIGHUP, lambda number, frame: print("heard\\n", end=""))
        init_process_group(timeout=60)
        os.kill(os.getpid(), signal.SIGHUP)
        """,
    )
    assert job.output.splitlines() == ["heard"] * 2


def test_a_library_that_the_launcher_cannot_start_is_told_before_it_ends_the_process(run_on: RunOn) -> None:
    script = "from syncline.collectives import init_process_group; init_process_group('mpi', timeout=60)"
    libraries = {}
    for name in MPIS:
        try:
            libraries[name] = mpi_runtimes.find(name).libmpi
        except ToolError as error:
            pytest.skip(str(error))
    for mpi, other, words in (
        ("openmpi", "mpich", "Open MPI's mpirun started this process, but does not work with MPICH"),
        ("mpich", "openmpi", "MPICH's mpiexec started this process, but does not work with Open MPI"),
    ):
        job = run_on(mpi, 2, script, plain=True, MPI4PY_LIBMPI=libraries[other])
        assert job.status != 0
        assert job.output.count(f"LaunchError: backend 'mpi': {words}") == 1, job.output
        assert "Abort(" not in job.output


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small /dev/shm, for which it needs root")
def test_the_doctor_outlives_an_mpi_that_crashes_at_its_start(tmp_path: Path) -> None:
    """MPICH writes to shared memory that does not exist (SIGBUS)."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip(f"there is no {mpiexec}; install the extra [mpich]")
    line = f"mount -t tmpfs -o size=2m tmpfs /dev/shm && exec {mpiexec} -n 2 {sys.executable} -m syncline.collectives doctor"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", line],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    said = " ".join(done.stdout.split())
    assert done.returncode != 0
    assert "WRONG MPI cannot be used, though PMI (MPICH, Intel MPI) launched this process" in said, done.stdout + done.stderr
    assert "WRONG /dev/shm 2 MiB" in said
    assert "docker run --shm-size=1g" in said
    assert "/dev/shm has 2 MiB; with less than 64 MiB MPICH may crash" in done.stderr
