"""Jobs that go wrong end soon, with a non-zero status and a reason. Each test starts jobs of its own."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch


def test_a_rank_raises_in_the_middle_of_a_step(run_job) -> None:
    job = run_job(
        2,
        """
        import torch
        from syncline.collectives import all_reduce, init_process_group

        def step(rank):
            all_reduce(torch.ones(3))
            if rank == 1:
                raise ValueError("the loss is not finite")
            all_reduce(torch.ones(3))

        step(init_process_group().rank)
        print("not reached")
        """,
    )
    assert job.status != 0
    assert "rank 1 of 2" in job.output
    assert "Traceback (most recent call last)" in job.output
    assert "in step" in job.output
    assert "ValueError: the loss is not finite" in job.output
    assert "not reached" not in job.output


def test_a_rank_that_left_early_fails_those_who_wait_for_it_and_nobody_else(run_job) -> None:
    """Rank 0 returns without closing the group. Rank 1 waits for it, in a collective and in a receive; rank 2 does not."""
    job = run_job(
        3,
        """
        import sys, time
        import torch
        from syncline.collectives import TransportError, init_process_group

        def main():
            group = init_process_group()
            pair = group.split(0 if group.rank < 2 else None)
            group.all_reduce(torch.ones(3))
            if group.rank == 0:
                return
            if group.rank == 2:
                time.sleep(600)  # the job ends long before
                sys.stdout.write("rank 2 is done\\n")
                return
            try:
                pair.recv(torch.ones(3), src=0)
            except TransportError as error:
                sys.stdout.write(f"received: {error}\\n")
            pair.all_reduce(torch.ones(3))

        main()
        """,
    )
    assert job.status != 0
    assert "received: recv(float32[3]" in job.output, job.output
    assert "rank 1 of 3" in job.output
    assert "Error: all_reduce(float32[3], op=SUM), number 0 on rank 1" in job.output
    assert "rank(s) 0 of the job left without taking part" in job.output
    assert "rank 2 is done" not in job.output  # rank 1's uncaught failure ended the job at once


def test_who_finishes_first_ends_no_work_of_others(run_job) -> None:
    """No group is closed. Rank 0 runs longer than the others wait before they announce their exit."""
    job = run_job(
        3,
        """
        import sys, time
        import torch
        import syncline.collectives.transports.mpi.job_abort as job_abort
        from syncline.collectives import all_reduce, init_process_group

        job_abort.NOTICE_AFTER_S = 0.01
        group = init_process_group()
        tensor = torch.ones(2)
        all_reduce(tensor)
        time.sleep(1.0 - group.rank / 2)
        sys.stdout.write(f"rank {group.rank} has {tensor.tolist()}\\n")  # in one piece, line end and all
        """,
    )
    assert job.status == 0, job.output
    assert sorted(job.output.split("\n")[:3]) == [f"rank {rank} has [3.0, 3.0]" for rank in range(3)]


def test_an_exit_status_is_kept_and_ends_no_work_once_the_group_is_closed(run_job) -> None:
    job = run_job(
        2,
        """
        import sys, time
        from syncline.collectives import destroy_process_group, init_process_group

        group = init_process_group()
        destroy_process_group()
        if group.rank == 1:
            sys.exit(3)
        time.sleep(1.0)
        print("rank 0 has saved its work", flush=True)
        """,
    )
    assert job.status == 3
    assert "rank 0 has saved its work" in job.output


def test_an_exit_status_ends_the_job_at_once(run_job) -> None:
    """Also if the script closes the group on its way out, because the others have not closed it."""
    job = run_job(
        2,
        """
        import sys, time
        from syncline.collectives import destroy_process_group, init_process_group

        group = init_process_group()
        try:
            try:
                sys.exit(4)
            except SystemExit:
                pass  # the job survives the first failure
            group.barrier()
            if group.rank == 1:
                sys.exit(3)
            time.sleep(600)
        finally:
            destroy_process_group()
        """,
    )
    assert job.status == 3, job.output
    assert "rank 1 of 2" in job.output
    assert "exits with status 3 and ends the job" in job.output


def test_an_exception_at_a_prompt_ends_what_was_typed(run_job) -> None:
    job = run_job(
        2,
        """
        import code, sys
        import torch
        from syncline.collectives import init_process_group

        group = init_process_group()
        sys.ps1 = ">>> "  # what makes Python interactive
        console = code.InteractiveConsole({"group": group, "torch": torch})
        if group.rank == 1:
            console.push("raise ValueError('typed wrongly')")
        console.push("tensor = torch.ones(1)")
        console.push("_ = group.all_reduce(tensor)")
        sys.stdout.write(f"{console.locals['tensor'].item()}\\n")
        """,
    )
    assert job.status == 0, job.output
    assert "ValueError: typed wrongly" in job.output
    assert job.output.count("2.0") == 2


def test_a_collective_that_not_all_call_times_out(run_job) -> None:
    job = run_job(
        2,
        """
        import time
        import torch
        from syncline.collectives import init_process_group

        group = init_process_group()
        group.set_timeout(1.5)  # not before, because the start of a rank may take longer
        if group.rank == 0:
            group.all_reduce(torch.ones(10))
        time.sleep(600)
        """,
    )
    assert job.status != 0
    assert "CollectiveTimeout: all_reduce(float32[10], op=SUM)" in job.output
    assert "rank 0 of 2 in group 'default'" in job.output
    assert "did not finish within 1.5 s" in job.output


def test_world_size_that_the_launcher_contradicts(run_job) -> None:
    job = run_job(2, "from syncline.collectives import init_process_group; init_process_group('mpi', world_size=4)")
    assert job.status != 0
    assert job.output.count("LaunchError: world_size=4 was asked for, but") == 1, job.output  # one rank speaks for all
    assert job.output.count("Traceback") == 1
    assert "started 2 rank(s)" in job.output


def test_launcher_and_library_of_different_mpis(run_job) -> None:
    """The launcher says 2, the library finds 1: as when mpiexec and libmpi belong to different MPIs."""
    job = run_job(
        1,
        """
        import os
        for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
            if name in os.environ:
                import mpi4py.MPI  # this import asks the launcher
                os.environ[name] = "2"
        from syncline.collectives import init_process_group
        init_process_group("mpi")
        """,
    )
    assert job.status != 0
    assert "LaunchError" in job.output
    assert "started 2 rank(s), but" in job.output
    assert "sees 1" in job.output
    assert "MPI4PY_LIBMPI" in job.output


def test_torchrun_with_an_mpi_installed(run_job, tmp_path: Path) -> None:
    """The doctor finds no problem. A script that asks for MPI there is told how to start MPI programs."""
    words = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable, "-m")
    doctor = run_job(None, "", *words, "syncline.collectives", "doctor")
    assert doctor.status == 0, doctor.output
    assert "torchrun, 2 process(es)" in doctor.output
    assert "WRONG" not in doctor.output
    job = run_job(None, "", *words, "syncline.collectives", "doctor", SYNCLINE_BACKEND="mpi")
    assert job.status != 0
    words_found = " ".join(job.output.split())
    assert "torchrun started these 2 ranks and does not start MPI programs. Start them with mpiexec or srun" in words_found


@pytest.mark.parametrize("through", ["syncline", "torch.distributed"])
def test_ranks_that_torchrun_starts_again_meet_again(run_job, through: str) -> None:
    job = run_job(
        None,
        """
        import os, sys, time
        import torch
        import torch.distributed as dist
        import syncline.collectives as sc
        import syncline.collectives.torch_backend

        tensor = torch.ones(1)
        if sys.argv[1] == "syncline":
            sc.init_process_group("gloo", timeout=60)
            sc.all_reduce(tensor)
        else:
            dist.init_process_group("syncline")
            dist.all_reduce(tensor)
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        os.write(1, f"attempt {attempt} has {tensor.item()}\\n".encode())
        if attempt == "0" and os.environ["RANK"] == "1":
            os._exit(3)
        if attempt == "0":
            time.sleep(600)  # torchrun ends this rank
        """,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"),
        *("script.py", through),
        SYNCLINE_BACKEND="gloo",
    )
    assert job.status == 0, job.output
    assert job.output.count("attempt 1 has 2.0") == 2, job.output


def test_no_mpi_library(run_job) -> None:
    job = run_job(
        1,
        "from syncline.collectives import init_process_group; init_process_group('mpi')",
        MPI4PY_LIBMPI="/nonexistent/libmpi.so",
    )
    assert job.status != 0
    assert "BackendUnavailableError: backend 'mpi': mpi4py finds no MPI library" in job.output
    assert "module load" in job.output
    assert "pip install mpi4py mpich" in job.output


def test_no_mpi_library_falls_back_to_gloo_alone(run_job) -> None:
    """Without a backend's name, one rank works without MPI; several ranks say what is missing."""
    script = """
    from syncline.collectives import init_process_group
    print(init_process_group().backend_name)
    """
    assert "gloo" in run_job(1, script, MPI4PY_LIBMPI="/nonexistent/libmpi.so").output
    job = run_job(2, script, MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    assert job.status != 0
    assert "LaunchError: mpi4py finds no MPI library" in job.output
    assert "another way for its 2 ranks to meet" in job.output


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_unknown_backend(run_job, how: str) -> None:
    argument = "'smoke'" if how == "argument" else ""
    variables = {} if how == "argument" else {"SYNCLINE_BACKEND": "smoke"}
    script = f"from syncline.collectives import init_process_group; init_process_group({argument})"
    job = run_job(3, script, **variables)
    assert job.status != 0
    found = "UnknownBackendError: unknown backend 'smoke'; installed backends: gloo, in_process, mpi"
    assert job.output.count(found) == job.output.count("Traceback") == 1, job.output


def test_mpi_listens_on_no_port(run_job) -> None:
    """Syncline opens no port beyond those that the MPI library opens at its start. Gloo shows that the test can see one."""
    script = """
    import os, sys
    import torch
    from syncline.collectives import all_reduce, destroy_process_group, init_process_group

    def listening():
        handles = [f"/proc/self/fd/{handle}" for handle in os.listdir("/proc/self/fd")]
        mine = {os.readlink(handle) for handle in handles if os.path.islink(handle)}
        found = []
        for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
            if os.path.exists(table):
                for line in open(table).read().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                        found.append(fields[1])
        return found

    from mpi4py import MPI  # starts MPI: MPICH over UCX and Open MPI listen for peers on other nodes
    MPI.COMM_WORLD.Barrier()
    before = listening()
    group = init_process_group(sys.argv[1])
    all_reduce(torch.ones(100000))
    sys.stdout.write(f"rank {group.rank} opened {len(listening()) - len(before)} port(s)\\n")
    destroy_process_group()
    """
    mpi = run_job(2, script, "script.py", "mpi")
    assert mpi.status == 0, mpi.output
    assert sorted(line for line in mpi.output.splitlines() if "opened" in line) == [
        f"rank {rank} opened 0 port(s)" for rank in range(2)
    ]
    gloo = run_job(2, script, "script.py", "gloo")
    assert gloo.status == 0, gloo.output
    assert "rank 0 opened 0 port(s)" not in gloo.output


def processes_with(inodes: set[str]) -> list[str]:
    """The processes of this machine that still have one of these files mapped."""
    found = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = [line.split() for line in path.read_text().splitlines() if "/memfd:syncline" in line]
        except OSError:
            continue  # the process has ended meanwhile
        if any(line[4] in inodes for line in lines):
            found.append(path.parent.name)
    return found


def test_a_killed_rank_leaves_no_memory(run_job) -> None:
    """Shared memory has no name in any file system, and is freed when its last rank is gone."""
    names = set(os.listdir("/dev/shm"))
    job = run_job(
        2,
        """
        import os
        import signal
        import torch
        from syncline.collectives import init_process_group

        def mapped(word, field=5):
            return {line.split(maxsplit=5)[field].strip() for line in open("/proc/self/maps") if word in line}

        group = init_process_group()
        group.barrier()
        before = mapped("/dev/shm")
        tensor = group.allocate(32 << 20, torch.float32)
        said = f"{mapped('/dev/shm') == before} {mapped('memfd:syncline')}"
        inodes = " ".join(f"inode={inode}." for inode in mapped("memfd:syncline", 4))
        print(f"{said} {inodes}\\n", end="", flush=True)
        for step in range(1000):
            group.all_reduce(tensor[:1 << 20])
            if step == 10 and group.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        print("not reached")
        """,
        plain=True,  # plain ranks have ended when mpiexec has; a fork would end a moment later
    )
    assert job.status != 0
    assert job.output.count("True {'/memfd:syncline-") == 2, job.output
    assert "not reached" not in job.output
    left = set(os.listdir("/dev/shm")) - names  # other programs of this machine may come and go
    assert not [name for name in left if "syncline" in name]
    inodes = set(re.findall(r"inode=(\d+)\.", job.output))
    assert inodes, job.output
    assert processes_with(inodes) == []
