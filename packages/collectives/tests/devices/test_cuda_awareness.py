from __future__ import annotations

import os

import pytest

from syncline.collectives.devices.cuda_awareness import CudaAwareness, try_cuda_awareness


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
    environ = {**os.environ, "PMI_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "1", "KEPT": "1"}
    child = (
        "import os; assert 'KEPT' in os.environ; "
        "assert not {'PMI_RANK', 'OMPI_COMM_WORLD_SIZE', 'SLURM_PROCID'} & set(os.environ); print('aware')"
    )
    assert try_cuda_awareness(environ, child).is_aware
