from __future__ import annotations

import pytest

from syncline.collectives import InvalidArgumentError, LaunchError
from syncline.collectives.startup.launch import Launch, check_init_method, detect_launch

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

A_OPEN_MPI = Launch("Open MPI", True, 3, 4, 1, 2)
A_MPICH = Launch("PMI (MPICH, Intel MPI)", True, 1, 2, 1, 2)
A_SRUN = Launch("Slurm", True, 5, 8, 1, None)
A_TORCHRUN = Launch("torchrun", False, 2, 3, 0, 1)
A_PMIX = Launch("PMIx", True, 3, None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PATH": "/bin", "RANK": "1"}, None),
        (OPEN_MPI, A_OPEN_MPI),
        (MPICH, A_MPICH),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Launch("PMI (MPICH, Intel MPI)", True, 0, 1)),
        (SRUN, A_SRUN),
        (TORCHRUN, A_TORCHRUN),
        (PMIX, A_PMIX),
        ({"PMIX_RANK": "3"}, None),
        (BY_HAND, Launch("RANK and WORLD_SIZE", False, 3, 4)),
        # RANK and WORLD_SIZE alone are anybody's variables.
        ({"RANK": "2", "WORLD_SIZE": "3"}, None),
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
        ({**PMIX, **BY_HAND}, A_PMIX),
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
