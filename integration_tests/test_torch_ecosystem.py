"""Checkpoints, compilation, Accelerate and Fabric over backend "syncline-mpi": jobs of their own, as they load much."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).parent / "torch_ecosystem.py"
NEEDS = {"accelerate": "accelerate", "fabric": "lightning_fabric"}


@pytest.mark.parametrize(
    "program", ["checkpoint_with_resharding", "compiled_ddp", "compiled_collective", "accelerate", "fabric"]
)
def test_like_gloo(run_job, tmp_path: Path, program: str) -> None:
    needed = NEEDS.get(program)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed; tools/requirements.txt lists it")
    job = run_job(2, "", str(SCRIPT), program, str(tmp_path), timeout_s=110.0)
    assert job.status == 0, job.output
    for rank in range(2):
        assert f"EQUAL {program} on rank {rank}" in job.output


def test_an_uncaught_exception_is_printed(run_job) -> None:
    """torch.distributed puts its excepthook before ours, and would print only after the job has been aborted."""
    job = run_job(
        2,
        """
        import torch.distributed as dist
        import syncline.collectives.torch_backend

        dist.init_process_group("syncline-mpi", init_method="mpi://")
        if dist.get_rank() == 1:
            raise ValueError("the loss is not finite")
        dist.barrier()
        """,
    )
    assert job.status != 0
    assert "rank 1 of 2" in job.output
    assert "ValueError: the loss is not finite" in job.output
