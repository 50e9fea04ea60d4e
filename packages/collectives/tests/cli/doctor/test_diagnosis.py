"""Every finding, from observations that were made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncline.collectives.cli.doctor import Finding, MPIFacts, Observation, Status, diagnose
from syncline.collectives.cli.doctor import diagnosis as d
from syncline.collectives.cli.doctor.diagnosis import survival
from syncline.collectives.cli.doctor.finding import exit_status, in_text, ok, summary
from syncline.collectives.cli.doctor.observation import _abi, nccl_version_in_words
from syncline.collectives.startup.nodes import HostIdentity
from syncline.collectives.startup.registry import BackendChoice
from syncline.collectives.transports.shared_memory.memory_limit import HEADROOM_BYTES, Limit

A, B = HostIdentity("a", "1"), HostIdentity("b", "2")
GIB = 2**30
MIB = 2**20
MPICH = MPIFacts("MPICH 5.0.2", "5.0", "mpich", "MULTIPLE", 2, "4.1.2")
FINE = Observation(
    host=A,
    software=(("torch", "2.13.0"), ("Python", "3.11.7")),
    launcher="Open MPI",
    launch_problem=None,
    launch_world_size=2,
    mpi=MPICH,
    mpi_lack=None,
    cores=frozenset({0, 1}),
    node_cores=2,
    threads=1,
    shm_total_bytes=2 * GIB,
    shm_free_bytes=GIB,
    memory_limits=(Limit((0, 0), "the memory of the machine", 10 * GIB),),
    sharing="yes: each rank read what the others of its node wrote",
)
GPU = replace(FINE, gpus=("H200",), cuda_aware="yes: MPI moved and reduced CUDA memory correctly", cupy="14.0", nccl="2.27.3")
MPI_CHOSEN = BackendChoice("mpi", "launched by Open MPI")
BACKENDS = ("gloo", "mpi", "nccl")


def test_a_healthy_job() -> None:
    findings = diagnose([FINE, FINE], MPI_CHOSEN, None, backends=BACKENDS)
    assert [finding.name for finding in findings] == [
        *(
            "software",
            "launcher",
            "site file",
            "MPI",
            "MPI threads",
            "nodes",
            "cores",
            "shared memory",
            "memory",
            "/dev/shm",
            "GPUs",
            "backend",
            "connection",
            "loss of a rank",
        )
    ]
    assert {finding.status for finding in findings} == {Status.OK}
    assert exit_status(findings) == 0
    assert summary(findings) == "everything is fine"


SMALL = Limit((1, 7), "the limit of /slurm/job_7", HEADROOM_BYTES + 2 * 127 * MIB)


def one(findings: list[Finding] | Finding) -> Finding:
    """The finding that is not ok; exactly one."""
    (found,) = [
        finding for finding in (findings if isinstance(findings, list) else [findings]) if finding.status is not Status.OK
    ]
    return found


ROWS = {
    "software": (
        lambda: d.software([FINE, replace(FINE, software=(("torch", "2.6.0"),)), FINE]),
        Status.WRONG,
        "ranks 0, 2: torch 2.13.0, Python 3.11.7; ranks 1: torch 2.6.0",
        "same versions",
    ),
    "a torch that was not run": (
        lambda: d.software([replace(FINE, software=(("torch", "2.7.1+cpu"),))]),
        Status.WARN,
        "torch 2.7.1+cpu; the tests of this version of Syncline were not run with torch 2.7.1+cpu",
        "try torch 2.6, 2.8, 2.10, 2.13, 2.14, 2.15",
    ),
    "launcher": (
        lambda: d.launcher([FINE, replace(FINE, launch_problem="PMI_RANK=1 and RANK=0")]),
        Status.WRONG,
        "PMI_RANK=1 and RANK=0",
        "clean the environment",
    ),
    "a job of torchrun among others": (
        lambda: d.launcher([replace(FINE, launch_warning="there may be 2 trainings")]),
        Status.WARN,
        "there may be 2 trainings",
        "start one job",
    ),
    "little /dev/shm": (
        lambda: d.memory([replace(FINE, shm_total_bytes=16 * MIB, shm_free_bytes=2 * MIB)]),
        Status.WARN,
        "16 MiB, 2 MiB free on a",
        "less than 64 MiB MPICH may crash while it starts",
    ),
    "little /dev/shm, and no MPI": (
        lambda: d.memory([replace(FINE, shm_total_bytes=16 * MIB, mpi=None)]),
        Status.WRONG,
        "16 MiB",
        "docker run --shm-size",
    ),
    "no MPI, alone": (
        lambda: d.mpi([replace(FINE, mpi=None, launcher=None, mpi_lack="install mpi4py")]),
        Status.WARN,
        "cannot be used here",
        "install mpi4py",
    ),
    "no MPI, launched": (
        lambda: d.mpi([replace(FINE, mpi=None, mpi_lack="install mpi4py")]),
        Status.WRONG,
        "though Open MPI launched",
        "install mpi4py",
    ),
    "two MPIs": (
        lambda: d.mpi([FINE, replace(FINE, mpi=replace(MPICH, library="Open MPI 5.0.1"))]),
        Status.WRONG,
        "ranks 0: MPICH 5.0.2; ranks 1: Open MPI 5.0.1",
        "same MPI module",
    ),
    "threads": (
        lambda: d.mpi([replace(FINE, mpi=replace(MPICH, thread_level="SERIALIZED"))]),
        Status.WRONG,
        "MPI_THREAD_SERIALIZED",
        "MPI_THREAD_MULTIPLE",
    ),
    "launcher of another MPI": (
        lambda: d.mpi([replace(FINE, mpi=replace(MPICH, world_size=1))]),
        Status.WRONG,
        "Open MPI started 2 process(es), MPICH 5.0.2 sees 1",
        "MPI4PY_LIBMPI",
    ),
    "unequal nodes": (
        lambda: d.nodes([FINE, FINE, replace(FINE, host=B)]),
        Status.WARN,
        "2 node(s), 3 rank(s): a with 2 (ranks 0, 1), b with 1 (ranks 2)",
        "same number of ranks",
    ),
    "bound to one core": (
        lambda: d.cores([replace(FINE, cores=frozenset({0}))] * 2),
        Status.WRONG,
        "2 rank(s) share 1 of 2 core(s) on a",
        "--bind-to none",
    ),
    "too many ranks": (
        lambda: d.cores([FINE] * 3),
        Status.WARN,
        "3 rank(s) share 2 of 2 core(s)",
        "at most 2 rank(s)",
    ),
    "too many threads": (
        lambda: d.cores([replace(FINE, threads=2)] * 2),
        Status.WARN,
        "2 thread(s) each",
        "OMP_NUM_THREADS=1",
    ),
    "the second node is worse": (
        lambda: d.cores([FINE, replace(FINE, host=B, cores=frozenset({3})), replace(FINE, host=B, cores=frozenset({3}))]),
        Status.WRONG,
        "share 1 of 2 core(s) on b",
        "--cpus-per-task",
    ),
    "the first node is worse": (
        lambda: d.cores([replace(FINE, cores=frozenset({0}))] * 2 + [replace(FINE, host=B, threads=2)] * 2),
        Status.WRONG,
        "share 1 of 2 core(s) on a",
        "--bind-to none",
    ),
    "no shared memory": (
        lambda: d.memory([replace(FINE, sharing="no: rank 1: [Errno 13] Permission denied")] * 2),
        Status.WARN,
        "rank 1: [Errno 13] Permission denied",
        "in one container",
    ),
    "no memory fence on one node": (
        lambda: d.memory([FINE, replace(FINE, host=B, has_fence=False)]),
        Status.WARN,
        "libatomic.so.1 is missing on a node",
        "install libatomic",
    ),
    "little memory on the second node": (
        lambda: d.memory([FINE] + [replace(FINE, host=B, memory_limits=(*FINE.memory_limits, SMALL))] * 2),
        Status.WARN,
        "127 MiB left for each of 2 rank(s) on b, by the limit of /slurm/job_7",
        "have 128 MiB or more for the buckets of gradients: give the job more memory (Slurm's --mem",
    ),
    "few threads on one rank": (
        lambda: d.mpi([FINE, FINE, replace(FINE, mpi=replace(MPICH, thread_level="FUNNELED"))]),
        Status.WRONG,
        "ranks 0, 1: MPI_THREAD_MULTIPLE; ranks 2: MPI_THREAD_FUNNELED",
        "MPI_THREAD_MULTIPLE",
    ),
    "launcher of another MPI on one rank": (
        lambda: d.mpi([FINE, replace(FINE, mpi=replace(MPICH, world_size=1))]),
        Status.WRONG,
        "ranks 0: the same number; ranks 1: Open MPI started 2 process(es), MPICH 5.0.2 sees 1",
        "MPI4PY_LIBMPI",
    ),
    "no MPI on the first rank": (
        lambda: d.mpi([replace(FINE, mpi=None), FINE]),
        Status.WRONG,
        "ranks 0: none; ranks 1: MPICH 5.0.2",
        "same MPI module",
    ),
    "no CUDA-awareness on one rank": (
        lambda: d.gpus([GPU, FINE, replace(GPU, cuda_aware="no: MPI crashed on CUDA memory (signal 11)")]),
        Status.WARN,
        "ranks 1: not tried; ranks 2: no: MPI crashed on CUDA memory (signal 11)",
        "pinned host memory",
    ),
    "no CUDA-awareness": (
        lambda: d.gpus([replace(GPU, cuda_aware="no: MPI crashed on CUDA memory (signal 11)"), GPU]),
        Status.WARN,
        "signal 11",
        "pinned host memory",
    ),
    "two ranks on one GPU": (
        lambda: d.gpus([replace(GPU, gpu_ids=("a",)), replace(GPU, gpu_ids=("a",))]),
        Status.WARN,
        "the 2 ranks on a see 1 together",
        "start at most 1 rank(s) there",
    ),
    "no CuPy": (
        lambda: d.gpus([replace(GPU, cupy=None)]),
        Status.WARN,
        "CuPy is not installed",
        "cupy-cuda12x nvidia-nccl-cu12",
    ),
    "no NCCL": (lambda: d.gpus([replace(GPU, nccl=None)]), Status.WARN, "CuPy 14.0 finds no NCCL", "nvidia-nccl"),
    "no backend": (lambda: d.backend(None, BACKENDS), Status.WRONG, "none could be chosen", "the line about the connection"),
    "a backend that nobody offers": (
        lambda: d.backend(BackendChoice("cpu:mpi,cuda:foo", "given as argument"), BACKENDS),
        Status.WRONG,
        "no backend 'foo' is installed (given as argument)",
        "name one of gloo, mpi, nccl",
    ),
    "other site files": (
        lambda: d.site_file([FINE, replace(FINE, site_file="/etc/x changes timeout_s = 9")]),
        Status.WARN,
        "ranks 0: none; ranks 1: /etc/x changes timeout_s = 9",
        "the same site file",
    ),
    "a broken site file": (
        lambda: d.site_file([replace(FINE, site_file="/etc/x", site_problem="/etc/x: unknown key 'a'")]),
        Status.WRONG,
        "/etc/x",
        "unknown key 'a'",
    ),
    "Gloo for want of MPI": (
        lambda: d.backend(BackendChoice("gloo", "launched by Slurm, but MPI cannot be used: no mpi4py"), BACKENDS),
        Status.WARN,
        "no mpi4py",
        "mend MPI",
    ),
    "no connection": (lambda: d.connection(2, "rank 1 is gone"), Status.WRONG, "rank 1 is gone", "run this command again"),
}


@pytest.mark.parametrize(("make", "status", "found", "remedy"), ROWS.values(), ids=ROWS)
def test_what_is_not_fine(make, status: Status, found: str, remedy: str) -> None:
    finding = one(make())
    assert finding.status is status
    assert found in finding.found
    assert remedy in finding.remedy


def test_gpus_that_are_fine() -> None:
    assert [finding.found for finding in d.gpus([FINE, GPU])] == [
        "1 visible to rank 1: H200",
        "yes: MPI moved and reduced CUDA memory correctly",
        "NCCL 2.27.3 through CuPy 14.0",
    ]


def test_no_gpu_could_be_tried() -> None:
    assert d.gpus([replace(GPU, cuda_aware=None)])[1].found == "not tried: MPI cannot be used where there are GPUs"


def test_a_small_dev_shm_is_no_matter() -> None:
    """What the ranks share does not lie there."""
    small = replace(FINE, host=B, shm_total_bytes=64 * MIB, shm_free_bytes=3 * MIB)
    assert {finding.status for finding in d.memory([FINE, small] + [FINE] * 9)} == {Status.OK}
    assert d.memory([FINE, small])[2].found == "64 MiB, 3 MiB free on b (MPI libraries use it, Syncline does not)"


def test_memory_of_which_nothing_is_known() -> None:
    unknown = replace(FINE, sharing=None, memory_limits=())
    assert [finding.found for finding in d.memory([unknown])[:2]] == [
        "not tried: the ranks are not connected by MPI",
        "this system does not say how much is left",
    ]


def test_a_launcher_that_does_not_say_how_many_contradicts_nobody() -> None:
    assert {finding.status for finding in d.mpi([replace(FINE, launch_world_size=None)])} == {Status.OK}


def test_exit_status_and_text() -> None:
    warn = Finding("cores", Status.WARN, "3 ranks share 2 cores", "start fewer")
    wrong = Finding("connection", Status.WRONG, "gone " * 30, "look for it")
    assert exit_status([ok("MPI", "there"), warn]) == 0
    assert exit_status([warn, wrong]) == 1
    lines = in_text([ok("MPI", "there"), warn, wrong], width=60).splitlines()
    assert lines[0] == "ok     MPI         there"
    assert lines[1:3] == ["warn   cores       3 ranks share 2 cores", "                   -> start fewer"]
    assert lines[3].startswith("WRONG  connection  gone")
    assert max(map(len, lines)) <= 60
    assert lines[-1] == "1 wrong, 1 to look at"


@pytest.mark.parametrize(("status", "remedy"), [(Status.OK, "do"), (Status.WARN, ""), (Status.WRONG, "")])
def test_a_remedy_if_and_only_if_something_is_not_ok(status: Status, remedy: str) -> None:
    with pytest.raises(ValueError, match="remedy if and only if"):
        Finding("x", status, "y", remedy)


@pytest.mark.parametrize(("number", "words"), [(22703, "2.27.3"), (22907, "2.29.7"), (2804, "2.8.4"), (21005, "2.10.5")])
def test_nccl_versions(number: int, words: str) -> None:
    assert nccl_version_in_words(number) == words


@pytest.mark.parametrize(
    ("file_name", "abi"),
    [
        ("MPI.openmpi.cpython-311-x86_64-linux-gnu.so", "openmpi"),
        ("MPI.mpich.abi3.so", "mpich"),
        ("MPI.cpython-311-x86_64-linux-gnu.so", "the one that mpi4py was built for"),
    ],
)
def test_abi(file_name: str, abi: str) -> None:
    assert _abi(file_name) == abi


def test_torchrun_beside_an_installed_mpi_is_healthy() -> None:
    """The library sees one process in each, for torchrun does not start MPI programs."""
    rank = replace(FINE, launcher="torchrun", launch_is_mpi=False, mpi=replace(MPICH, world_size=1))
    assert {finding.status for finding in diagnose([rank, rank], MPI_CHOSEN, None, backends=BACKENDS)} == {Status.OK}
    lacks = replace(rank, mpi=None, mpi_lack="install mpi4py")
    assert {finding.status for finding in d.mpi([lacks, lacks])} == {Status.WARN}


def test_ranks_that_did_not_connect_are_not_taken_for_one_rank() -> None:
    findings = diagnose([replace(FINE, mpi=None, mpi_lack="install mpi4py")], None, "no way to meet", backends=BACKENDS)
    (found,) = [finding for finding in findings if finding.name in ("nodes", "cores")]
    assert found.status is Status.WARN
    assert found.found.startswith("1 of 2 ranks looked at")


def test_a_command_can_be_copied() -> None:
    command = "pip install 'syncline-collectives[mpich]' and a long command that does not fit into the width of the text at all"
    text = in_text(
        [Finding("MPI", Status.WRONG, "none", f"on a cluster try `--bind-to none`; elsewhere `{command}` brings one")]
    )
    assert [line.strip() for line in text.splitlines()[1:4]] == [
        "-> on a cluster try `--bind-to none`; elsewhere",
        command,
        "brings one",
    ]


@pytest.mark.parametrize(
    ("launcher", "size", "lack", "found"),
    [
        (None, 1, None, "nobody would be left"),
        ("Open MPI", 2, "MPI cannot", "does not survive it: MPI cannot"),
        ("torchrun", 2, None, "does not survive it: torchrun ends all ranks"),
        ("Slurm", 2, None, "can survive it, if srun was given --no-kill --kill-on-bad-exit=0"),
        (None, 2, None, "can survive it: the ranks that are left"),
    ],
)
def test_whether_a_job_survives_the_loss_of_a_rank(launcher: str | None, size: int, lack: str | None, found: str) -> None:
    assert found in survival(launcher, size, lack).found


def test_a_job_of_a_fault_tolerant_mpirun_survives_it() -> None:
    assert "mpirun ends the job" in survival("Open MPI", 2, None).found
    assert "can survive it" in survival("Open MPI", 2, None, tolerates_faults=True).found


def test_who_starts_no_mpi_needs_no_shared_memory() -> None:
    little = replace(FINE, shm_total_bytes=2 * MIB)
    for rank in (replace(little, launch_is_mpi=False), replace(little, launch_world_size=1)):
        assert {finding.status for finding in d.memory([rank])} == {Status.OK}
