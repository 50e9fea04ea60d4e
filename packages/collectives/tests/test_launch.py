from __future__ import annotations

import pytest

from syncline.collectives import LaunchError
from syncline.collectives.launch import Launch, detect_launch

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
SBATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a"}

A_OPEN_MPI = Launch("Open MPI", True, 3, 4, 1, 2)
A_MPICH = Launch("PMI (MPICH, Intel MPI)", True, 1, 2, 1, 2)
A_SRUN = Launch("Slurm", True, 5, 8, 1, None)
A_TORCHRUN = Launch("torchrun", False, 2, 3, 0, 1)


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
        # RANK and WORLD_SIZE alone are anybody's variables.
        ({"RANK": "2", "WORLD_SIZE": "3"}, None),
        # The innermost launcher speaks.
        ({**SRUN, **OPEN_MPI}, A_OPEN_MPI),
        ({**SRUN, **MPICH}, A_MPICH),
        ({**OPEN_MPI, **TORCHRUN}, A_TORCHRUN),
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
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "whole number in LOCAL_RANK"),
    ],
)
def test_nonsense(environ: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        detect_launch(environ)


def test_srun_with_nodes_of_several_shapes() -> None:
    """Slurm writes tasks per node as a pattern when nodes differ, and does not set it otherwise."""
    assert detect_launch({**SRUN, "SLURM_NTASKS_PER_NODE": "4"}) == Launch("Slurm", True, 5, 8, 1, 4)
