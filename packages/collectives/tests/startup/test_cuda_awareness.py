from __future__ import annotations

import os

import pytest

from syncline.collectives.startup.mpi_library import CudaAwareness, try_cuda_awareness


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ("print('aware')", "yes: MPI moved and reduced CUDA memory correctly"),
        ("import os; os.kill(os.getpid(), 11)", "no: MPI crashed on CUDA memory (signal 11)"),
        ("raise RuntimeError('not aware')", "no: MPI did not move CUDA memory (RuntimeError: not aware)"),
        ("pass", "no: MPI did not move CUDA memory (no message)"),
    ],
)
def test_outcomes(child: str, expected: str) -> None:
    assert try_cuda_awareness(child=child) == CudaAwareness(expected.startswith("yes"), expected)


def test_a_hang_ends() -> None:
    assert "did not end within 0.5 s" in try_cuda_awareness(child="import time; time.sleep(60)", timeout_s=0.5).in_words


def test_the_child_does_not_join_the_job() -> None:
    """But it has the same transport: what the user has chosen stays."""
    launchers = {"PMI_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"}
    users = {"KEPT", "OMPI_MCA_pml", "OMPI_MCA_btl", "UCX_TLS"}
    child = (
        f"import os; found = set(os.environ); "
        f"assert found >= {users}, found; assert not found & {launchers}, found; print('aware')"
    )
    found = try_cuda_awareness({**os.environ, **dict.fromkeys(launchers | users, "1")}, child)
    assert found.is_aware, found
