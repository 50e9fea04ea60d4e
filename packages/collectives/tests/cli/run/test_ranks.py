"""Who a process is, from variables alone; and what there is of threads and addresses to decide."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from syncline.collectives import LaunchError
from syncline.collectives.cli.run import ranks
from syncline.collectives.cli.run.ranks import Job, find_job, first_host, set_variables, started_id, tasks_per_node, threads_for
from syncline.collectives.startup.launch import PLACE_VARIABLE, Launch, detect_launch, is_own_run_id, take_launch


@pytest.fixture
def without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "missing_library", lambda: "mpi4py is not installed\nInstall it")


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_slurm_without_mpi(without_mpi: None) -> None:
    job = find_job(SLURM, None)
    assert job is not None
    assert (job.rank, job.size, job.local_rank, job.local_size, job.node, job.nodes) == (5, 7, 1, 3, 1, 2)
    assert job.address == "gpu07"
    assert job.without_mpi == "mpi4py is not installed"
    others = find_job({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}, None)
    assert others is not None
    assert (others.port, others.run_id) == (job.port, job.run_id)
    another_step = find_job({**SLURM, "SLURM_STEP_ID": "4"}, None)
    assert another_step is not None
    assert another_step.port != job.port


def test_a_rank_whose_starter_has_ended_starts_no_job() -> None:
    started = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4321"}
    run_id = f"{started_id(os.getpid())}0123abcd"  # a process that is not the parent of this one
    with pytest.raises(LaunchError, match="`syncline run` that started this rank has ended"):
        find_job({**started, "TORCHELASTIC_RUN_ID": run_id}, 3)


def test_pmi_without_mpi(without_mpi: None) -> None:
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    job = find_job(hydra, None)
    assert job is not None
    assert (job.rank, job.size, job.local_rank, job.local_size, job.node, job.nodes) == (1, 2, 1, 2, 0, 1)
    assert job.address == "127.0.0.1"
    two_nodes = {**hydra, "PMI_SIZE": "4", "PMI_RANK": "3"}
    with pytest.raises(LaunchError, match="MASTER_ADDR and MASTER_PORT must say where rank 0 is: mpi4py is not installed"):
        find_job(two_nodes, None)
    job = find_job({**two_nodes, "MASTER_ADDR": "head", "MASTER_PORT": "4321"}, None)
    assert job is not None
    assert (job.node, job.nodes, job.address, job.port) == (1, 2, "head", 4321)


def _has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def test_by_hand() -> None:
    """As Kubernetes does it: nothing but torchrun's variables."""
    said = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "head", "MASTER_PORT": "4321"}
    job = find_job(said, None)
    assert job is not None
    assert (job.rank, job.size, job.address, job.port) == (2, 3, "head", 4321)
    assert find_job(said, 4) is None  # the user wants ranks here


@pytest.mark.parametrize(
    ("said", "is_told"),
    [
        ({}, True),
        ({"LOCAL_RANK": "0"}, True),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, False),
        ({"MASTER_ADDR": "127.0.0.1"}, False),
        pytest.param({"MASTER_ADDR": "::1"}, False, marks=pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here")),
    ],
)
def test_by_hand_ranks_of_another_host_are_not_counted_in_silence(
    said: dict[str, str], is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    # 192.0.2.0/24 is for documentation, so this address is not of this host.
    assert find_job({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "4321", **said}, None)
    told = "LOCAL_WORLD_SIZE is 2. But MASTER_ADDR=192.0.2.7 is another host"
    assert [told in line for line in capsys.readouterr().err.splitlines()] == [True] * is_told


def test_a_warning_that_nobody_reads_ends_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as unread, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", unread)
        assert find_job({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "4321"}, None)


def test_a_launcher_of_mpi_is_not_told_to_set_variables_that_nobody_reads(
    without_mpi: None, capsys: pytest.CaptureFixture[str]
) -> None:
    flux = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"}
    assert find_job({**flux, "MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "4321"}, None)
    assert capsys.readouterr().err == ""


def test_by_hand_a_rank_that_only_knows_the_size_of_its_node() -> None:
    said = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "4321"}
    job = find_job(said, None)
    assert job is not None
    assert (job.local_rank, job.local_size, job.node) == (1, 2, 1)


def test_by_hand_on_several_nodes_all_ranks_need_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node has another parent process, so ranks of several nodes cannot compute a common port from it."""
    said = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "head"}
    for port in ({}, {"MASTER_PORT": "http"}):
        with pytest.raises(LaunchError, match="on 2 nodes, and MASTER_PORT must say where rank 0 is") as caught:
            find_job({**said, **port}, None)
        assert "give all ranks MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there" in str(caught.value)
    run_ids = set()
    for parent in (11, 12):
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        job = find_job({**said, "MASTER_PORT": "4321"}, None)
        assert job is not None
        assert job.port == 4321
        run_ids.add(job.run_id)
    assert len(run_ids) == 1


def test_alone() -> None:
    job = find_job({"RANK": "0", "WORLD_SIZE": "1"}, None)
    assert job is not None
    assert (job.rank, job.size, job.nodes) == (0, 1, 1)
    assert find_job({}, 2) is None


@pytest.mark.parametrize(
    ("environ", "wanted", "words"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "RANK": "0"}, None, "two launchers at once"),
        (SLURM, 8, r"Slurm started 7 rank\(s\), and `-n 8` asks for others"),
    ],
)
def test_two_launchers(environ: dict[str, str], wanted: int | None, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        find_job(environ, wanted)


def test_a_child_of_a_rank_is_no_rank_but_ranks_of_a_job_inside_are(without_mpi: None) -> None:
    """Both inherit what the command has set for the rank; those of another job have a place of their own."""
    rank = {"TORCHELASTIC_RUN_ID": "syncline-mpi-12345678", "PMI_RANK": "0", "PMI_SIZE": "2", "RANK": "0", "WORLD_SIZE": "2"}
    assert take_launch(rank) is not None
    child = {**rank, PLACE_VARIABLE: rank[PLACE_VARIABLE].replace(str(os.getpid()), str(os.getppid()))}
    with pytest.raises(LaunchError, match=f"a rank of the job .pid {os.getppid()}. started this process, which is no rank"):
        find_job(child, None)
    job = find_job({**child, "PMI_RANK": "2", "PMI_SIZE": "3"}, None)
    assert job is not None
    assert (job.rank, job.size) == (2, 3)


def test_the_launcher_around_it_speaks_to_our_own_groups() -> None:
    """TORCHELASTIC_RUN_ID is torchrun's signature, but for that which this command sets."""
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ours, torchruns = (detect_launch({**pmi, "TORCHELASTIC_RUN_ID": run_id}) for run_id in ("syncline-mpi-12345678", "none"))
    assert ours is not None
    assert torchruns is not None
    assert (ours.launcher, torchruns.launcher) == ("PMI (MPICH, Intel MPI)", "torchrun")


@pytest.mark.parametrize("run_id", ["syncline-7", "syncline-bench", "syncline-mpi-7", "my-syncline-mpi-12345678"])
def test_a_run_id_of_torchrun_may_begin_with_our_name(run_id: str) -> None:
    """The variables of srun describe torchrun's agent here, and those of torchrun the process."""
    torchrun = {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": "0", "RANK": "13", "WORLD_SIZE": "14"}
    assert detect_launch({**SLURM, **torchrun}) == Launch("torchrun", False, 13, 14)
    with pytest.raises(LaunchError, match="torchrun started this process"):
        find_job({**SLURM, **torchrun}, None)


def test_own_run_ids(without_mpi: None) -> None:
    """`syncline run` knows the run ids that it makes."""
    jobs = [find_job({}, None), find_job({"RANK": "2", "WORLD_SIZE": "3"}, None), find_job(SLURM, None)]
    assert all(job is not None and is_own_run_id(job.run_id) for job in jobs)
    assert is_own_run_id(f"{started_id(4711)}12345678")


def job_of(**changes: object) -> Job:
    whole = {
        "rank": 3,
        "size": 4,
        "local_rank": 1,
        "local_size": 2,
        "node": 1,
        "nodes": 2,
        "address": "head",
        "port": 1234,
        "run_id": "syncline-x",
        "carrier": "a test",
    }
    return Job(**{**whole, **changes})  # type: ignore[arg-type]


def test_what_disagrees_is_overridden_and_named() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "16", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "5"}
    assert set_variables(job_of(), environ) == ["WORLD_SIZE=16 (now 4)", "MASTER_PORT=29500 (now 1234)"]
    assert environ == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RUN_ID": "syncline-x",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


EIGHT = frozenset(range(8))


@pytest.mark.parametrize(
    ("local_cores", "quota", "threads"),
    [
        ([EIGHT] * 2, float("inf"), [4, 4]),
        ([EIGHT] * 3, float("inf"), [2, 2, 2]),
        ([EIGHT] * 16, float("inf"), [1] * 16),
        ([frozenset({0, 1}), frozenset({2, 3, 4})], float("inf"), [2, 3]),  # the launcher gave each its own
        ([frozenset({0, 1, 2, 3}), frozenset({2, 3, 4, 5})], float("inf"), [3, 3]),
        ([EIGHT] * 2, 4.0, [2, 2]),  # a container may keep four of them busy
        ([EIGHT] * 2, 0.5, [1, 1]),
    ],
)
def test_threads_are_a_fair_share(local_cores: list[frozenset[int]], quota: float, threads: list[int]) -> None:
    assert [threads_for(local_cores, rank, quota) for rank in range(len(local_cores))] == threads


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node1", "node1"), ("n[0-3]", "n0"), ("gpu[07-09,12],login1", "gpu07"), ("a1,b[2-3]", "a1"), ("r[1-2]c[3-4]", "r1c3")],
)
def test_the_first_host_of_slurms_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(("text", "counts"), [("3", [3]), ("2(x3)", [2, 2, 2]), ("4(x2),3", [4, 4, 3]), ("1,2,3", [1, 2, 3])])
def test_slurms_counts(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


def test_a_master_address_counts_if_it_is_of_this_host() -> None:
    assert ranks._is_own("127.0.0.1")
    assert not ranks._is_own("203.0.113.7")
    assert not ranks._is_own("")


def test_a_master_port_counts_if_it_is_free() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert ranks._free_port({"MASTER_PORT": str(port)}) != port
    assert ranks._free_port({"MASTER_PORT": str(port)}) == port
    assert ranks._free_port({"MASTER_PORT": "http"}) > 0


@pytest.mark.parametrize(
    ("backend", "words"),
    [("smoke", "unknown --backend 'smoke'"), ("mpi", "--backend mpi: there is no MPI, for this process is alone")],
)
def test_the_next_run_is_refused_in_words_too(backend: str, words: str) -> None:
    command = [sys.executable, "-m", "syncline.collectives", "run", "--backend", backend, "train.py"]
    done = [subprocess.run(command, capture_output=True, text=True) for _ in range(2)]
    assert [(run.stderr.count(words), run.returncode) for run in done] == [(1, 2)] * 2
