from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest

from syncline.collectives import InvalidArgumentError, LaunchError
from syncline.collectives.startup.launch import (
    PLACE_VARIABLE,
    Launch,
    check_init_method,
    detect_launch,
    launch_by,
    parent_rank,
    several_torchrun_jobs,
    take_launch,
)

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
SALLOC = {**SRUN, "SLURM_STEP_ID": "4294967290"}  # an interactive shell
SBATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}

PMIX = {"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-host-1@1"}
BY_HAND = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "1",
}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_ID": "f1"}
PALS = {"PALS_RANKID": "3", "PALS_APID": "a1", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}
JSM = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}

A_OPEN_MPI = Launch("Open MPI", True, 3, 4, 1, 2)
A_MPICH = Launch("PMI (MPICH, Intel MPI)", True, 1, 2, 1, 2)
A_SRUN = Launch("Slurm", True, 5, 8, 1, None)
A_TORCHRUN = Launch("torchrun", False, 2, 3, 0, 1)
A_PMIX = Launch("PMIx", True, 3, None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PATH": "/bin", "RANK": "captain"}, None),
        (OPEN_MPI, A_OPEN_MPI),
        (MPICH, A_MPICH),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Launch("PMI (MPICH, Intel MPI)", True, 0, 1)),
        (SRUN, A_SRUN),
        (TORCHRUN, A_TORCHRUN),
        (PMIX, A_PMIX),
        ({"PMIX_RANK": "0"}, None),
        (BY_HAND, Launch("RANK and WORLD_SIZE", False, 3, 4)),
        # Where the ranks meet, they may be told in another way.
        ({"RANK": "2", "WORLD_SIZE": "3"}, Launch("RANK and WORLD_SIZE", False, 2, 3)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"}, Launch("RANK and WORLD_SIZE", False, 0, 1)),
        (MVAPICH, Launch("MVAPICH", True, 1, 2, 0, 1)),
        (FLUX, Launch("Flux", True, 3, 4, 1, None)),
        (PALS, Launch("PALS", True, 3, None, 1, 2)),
        (JSM, Launch("JSM", True, 3, 4, 1, 2)),
        # Their libraries' own launchers say the same, and come first; Flux runs inside Slurm.
        ({**MVAPICH, **MPICH}, A_MPICH),
        ({**PALS, **MPICH}, A_MPICH),
        ({**JSM, **OPEN_MPI, **PMIX}, A_OPEN_MPI),
        ({**SRUN, **FLUX}, Launch("Flux", True, 3, 4, 1, None)),
        # The innermost launcher speaks.
        ({**SRUN, **OPEN_MPI}, A_OPEN_MPI),
        ({**SRUN, **MPICH}, A_MPICH),
        ({**OPEN_MPI, **TORCHRUN}, A_TORCHRUN),
        ({**PMIX, **OPEN_MPI}, A_OPEN_MPI),
        ({**PMIX, **SRUN}, A_SRUN),
        ({**PMIX, **MPICH}, A_MPICH),
        # One torchrun on each node of an MPI job, whose numbers count nodes.
        ({**SRUN, **MPICH, **PMIX, **TORCHRUN}, A_TORCHRUN),
        # Scripts repeat MPI's variables under torch's names.
        ({**OPEN_MPI, **BY_HAND}, A_OPEN_MPI),
        ({**SRUN, "RANK": "5", "WORLD_SIZE": "8"}, A_SRUN),
        # Half a pair claims nothing.
        ({**OPEN_MPI, "RANK": "0"}, A_OPEN_MPI),
        # A batch script, or a shell in an allocation, was not started by srun.
        (SBATCH, None),
        ({**SBATCH, "SLURM_STEP_ID": "batch"}, None),
        ({**SBATCH, "SLURM_STEP_ID": "interactive"}, None),
        ({**SBATCH, "SLURM_STEP_ID": ""}, None),
        ({**SBATCH, **MPICH}, A_MPICH),
    ],
)
def test_environments(environ: dict[str, str], expected: Launch | None) -> None:
    assert detect_launch(environ) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCHRUN, **MPICH}, "but PMI (MPICH, Intel MPI) says PMI_SIZE=2, so there may be 2 trainings"),
        ({**TORCHRUN, **SRUN, "GROUP_WORLD_SIZE": "1"}, "but Slurm says SLURM_NTASKS=8, so there may be 8 trainings"),
        ({**TORCHRUN, **SRUN, "GROUP_WORLD_SIZE": "8"}, None),
        ({**TORCHRUN, **SRUN, "SLURM_NTASKS": "1"}, None),
        ({**TORCHRUN, **SRUN, "RANK": "3", "WORLD_SIZE": "8"}, None),  # as Slurm says: a script has set torchrun's variables
        ({**TORCHRUN, **SALLOC}, None),
        ({**TORCHRUN, **PMIX}, None),
        (TORCHRUN, None),
        (SRUN, None),
    ],
)
def test_torchrun_of_one_node_in_a_job_of_several_processes(environ: dict[str, str], words: str | None) -> None:
    launch = detect_launch(environ)
    assert launch is not None
    found = several_torchrun_jobs(launch, environ)
    assert found is None if words is None else words in (found or "")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**MPICH, "PMI_RANK": "one"}, "whole number in PMI_RANK, found 'one'"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, "whole number in OMPI_COMM_WORLD_SIZE, found ''"),
        ({**MPICH, "PMI_RANK": "2"}, "PMI_RANK=2 and PMI_SIZE=2; expected a rank below"),
        ({**SRUN, "SLURM_PROCID": "-1"}, "SLURM_PROCID=-1"),
        ({**PMIX, "PMIX_RANK": "-1"}, "PMIx set PMIX_RANK=-1; expected"),
    ],
)
def test_nonsense(environ: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        detect_launch(environ)


def test_srun_with_nodes_of_several_shapes() -> None:
    """Slurm writes tasks per node as a pattern when nodes differ, and does not set it otherwise."""
    assert detect_launch({**SRUN, "SLURM_NTASKS_PER_NODE": "4"}) == Launch("Slurm", True, 5, 8, 1, 4)


@pytest.mark.parametrize(
    ("environ", "both"),
    [
        ({**MVAPICH, **MPICH, "PMI_RANK": "0"}, ["PMI_RANK=0 and PMI_SIZE=2", "MV2_COMM_WORLD_RANK=1"]),
        ({**OPEN_MPI, **MPICH}, ["OMPI_COMM_WORLD_RANK=3 and OMPI_COMM_WORLD_SIZE=4", "PMI_RANK=1 and PMI_SIZE=2"]),
        ({**OPEN_MPI, **BY_HAND, "RANK": "0"}, ["OMPI_COMM_WORLD_RANK=3 and", "RANK=0 and WORLD_SIZE=4"]),
        ({**OPEN_MPI, **BY_HAND, "WORLD_SIZE": "8"}, ["OMPI_COMM_WORLD_SIZE=4", "RANK=3 and WORLD_SIZE=8"]),
        ({**MPICH, "RANK": "0", "WORLD_SIZE": "1"}, ["PMI_RANK=1 and PMI_SIZE=2", "RANK=0 and WORLD_SIZE=1"]),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "8"}, ["SLURM_PROCID=5 and SLURM_NTASKS=8", "RANK=0 and WORLD_SIZE=8"]),
        ({**PMIX, **BY_HAND, "RANK": "1"}, ["PMIX_RANK=3", "RANK=1 and WORLD_SIZE=4"]),
    ],
)
def test_contradictions_show_both_values(environ: dict[str, str], both: list[str]) -> None:
    with pytest.raises(LaunchError, match="both claim to be about this process") as caught:
        detect_launch(environ)
    assert all(words in str(caught.value) for words in both)


def test_a_world_size_that_the_launcher_does_not_say() -> None:
    """A script that exports RANK and WORLD_SIZE knows the size."""
    assert detect_launch({**PMIX, **BY_HAND}) == replace(A_PMIX, world_size=4)


def test_local_numbers_are_shown_not_trusted() -> None:
    """They come from the communicator; a pattern in them is no error."""
    assert detect_launch({**TORCHRUN, "LOCAL_RANK": "x"}) == Launch("torchrun", False, 2, 3, None, 1)
    assert detect_launch({**SRUN, "SLURM_NTASKS_PER_NODE": "4(x2),3"}) == A_SRUN


@pytest.mark.parametrize(("launch", "least"), [(A_PMIX, 4), (A_SRUN, 8)])
def test_least_world_size(launch: Launch, least: int) -> None:
    assert launch.least_world_size() == least


@pytest.mark.parametrize(
    ("init_method", "scheme"),
    [(None, None), ("mpi://", "mpi"), ("env://", "env"), ("file:///tmp/x", "file"), ("tcp://host:1234", "tcp")],
)
def test_init_methods(init_method: str | None, scheme: str | None) -> None:
    assert check_init_method(init_method) == scheme


@pytest.mark.parametrize("init_method", ["", "mpi", "udp://host:1", "tcp:host:1", "://", "MPI://"])
def test_unknown_init_methods_list_the_known(init_method: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"known are mpi:// .*env:// .*file:// .*tcp://") as caught:
        check_init_method(init_method)
    assert repr(init_method) in str(caught.value)


def test_an_interactive_slurm_shell_is_no_launch() -> None:
    assert detect_launch(SALLOC) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, "RANK=1 in the environment: this is one of several processes, but WORLD_SIZE is missing"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 in the environment: this is one of several processes, but RANK is missing"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "but OMPI_COMM_WORLD_RANK is missing"),
        ({"PMI_RANK": "2"}, "PMI_RANK=2 in .* but PMI_SIZE is missing"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "but MV2_COMM_WORLD_RANK is missing"),
        ({"FLUX_JOB_SIZE": "2"}, "but FLUX_TASK_RANK is missing"),
        ({"PALS_RANKID": "1"}, "but PALS_APID is missing"),
        ({"JSM_NAMESPACE_RANK": "1"}, "but JSM_NAMESPACE_SIZE is missing"),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, "SLURM_PROCID=3 and SLURM_NTASKS=8 in .* but SLURM_STEP_ID is missing"),
        ({"PMIX_RANK": "3"}, "but PMIX_NAMESPACE is missing"),
    ],
)
def test_a_claim_that_is_not_understood_is_no_process_alone(environ: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words) as caught:
        detect_launch(environ)
    first = str(caught.value).splitlines()[0]
    assert "each process would train alone" in first
    assert len(first) <= 200
    assert detect_launch(environ, is_given=True) is None


# ---- the place of a process ----


def child_of(environ: dict[str, str]) -> dict[str, str]:
    """What a child of the process with this environment inherits, as if this process were another one."""
    pid, place = environ[PLACE_VARIABLE].split(" ", 1)
    return {**environ, PLACE_VARIABLE: f"{int(pid) + 1} {place}"}


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH, SRUN, TORCHRUN, PMIX, BY_HAND, FLUX, PALS], ids=lambda env: min(env))
def test_a_child_inherits_the_variables_and_not_the_place(launcher: dict[str, str]) -> None:
    environ = dict(launcher)
    launch = take_launch(environ)
    assert launch == detect_launch(launcher)
    assert take_launch(environ) == launch  # the same process again, after its first group
    child = child_of(environ)
    assert parent_rank(child) == os.getpid() + 1
    with pytest.raises(LaunchError, match=rf"child of rank {launch.rank} \(pid {os.getpid() + 1}\)") as caught:
        take_launch(child)
    assert len(str(caught.value).splitlines()[0]) <= 200
    assert "__main__" in str(caught.value)
    assert take_launch(child, is_given=True) is None  # its own rank and size count


def test_without_a_launcher_there_is_no_place_to_take() -> None:
    environ = {"PATH": "/bin"}
    assert take_launch(environ) is None
    assert environ == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("launcher", "anew"),
    [
        (OPEN_MPI, {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-host-2@1"}),
        (MPICH, {**MPICH, "PMI_PORT": "node:7"}),
        (MPICH, TORCHRUN),
        (SRUN, {**SRUN, "SLURM_STEP_ID": "1"}),
        (TORCHRUN, {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}),
        (BY_HAND, {**BY_HAND, "RANK": "2"}),
    ],
)
def test_a_launcher_inside_a_rank_gives_places_of_its_own(launcher: dict[str, str], anew: dict[str, str]) -> None:
    environ = dict(launcher)
    take_launch(environ)
    inside = {**child_of(environ), **anew}
    assert parent_rank(inside) is None
    assert take_launch(inside) == detect_launch(inside)
    assert inside[PLACE_VARIABLE].startswith(f"{os.getpid()} ")


def test_what_a_script_writes_beside_mpis_variables_gives_no_place() -> None:
    """RANK and WORLD_SIZE are often copied from them, also after the group was made."""
    environ = dict(MPICH)
    take_launch(environ)
    assert parent_rank({**child_of(environ), "RANK": "1", "WORLD_SIZE": "2"}) is not None


def test_mpiexec_inside_a_rank_of_mpich_is_known_by_its_socket() -> None:
    """All its variables may be those of the job outside: rank 0 of 2 in both."""
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull) as no_socket:
        environ = {**MPICH, "PMI_FD": str(ours.fileno())}
        take_launch(environ)
        child = child_of(environ)
        assert parent_rank(child) is not None  # a fork has the socket as well
        assert parent_rank({**child, "PMI_FD": str(theirs.fileno())}) is None
        assert parent_rank({**child, "PMI_FD": str(no_socket.fileno())}) is not None
    assert parent_rank(child) is not None  # and a new program has none


class Communicator:
    """As mpi4py's; rank -1: MPI.COMM_NULL."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __bool__(self) -> bool:
        return self.rank >= 0

    def Get_rank(self) -> int:  # noqa: N802 - MPI's name
        return self.rank

    def Get_size(self) -> int:  # noqa: N802 - MPI's name
        return self.size


def test_the_place_in_a_communicator() -> None:
    launch = launch_by(Communicator(1, 3))
    assert (launch.rank, launch.world_size, launch.is_mpi) == (1, 3, True)
    for none in (Communicator(-1, 0), None, "MPI.COMM_WORLD"):
        with pytest.raises(InvalidArgumentError, match="expected an mpi4py communicator that this rank is in"):
            launch_by(none)
