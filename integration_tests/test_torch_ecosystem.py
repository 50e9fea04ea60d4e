"""Frameworks, checkpoints and compilation over backend "syncline": jobs of their own, as they load much."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from test_support.full_run import cases

pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).parent / "torch_ecosystem.py"
ACCELERATE_SCRIPTS = SCRIPT.with_name("accelerate_scripts.py")
# Each program, and what it needs.
PROGRAMS = {
    "checkpoint_with_resharding": "torch",
    "compiled_ddp": "torch",
    "compiled_collective": "torch",
    "accelerate": "accelerate",
    "fabric": "lightning_fabric",
    "lightning_trainer": "pytorch_lightning",
    "transformers_trainer": "transformers",
}


def skip_without(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; tools/requirements.txt lists it")


# Lightning's trainer stands on Fabric, and Transformers' on Accelerate, whose own scripts run below.
IN_FULL = ("accelerate", "fabric")
USUAL = [program for program in PROGRAMS if program not in IN_FULL]


@pytest.mark.parametrize("program", cases(USUAL, in_full=IN_FULL))
def test_like_gloo(run_job, tmp_path: Path, program: str) -> None:
    skip_without(PROGRAMS[program])
    job = run_job(2, "", str(SCRIPT), program, str(tmp_path), timeout_s=110.0)
    assert job.status == 0, job.output
    for rank in range(2):
        assert f"EQUAL {program} on rank {rank}" in job.output


def test_accelerates_own_scripts(run_job) -> None:
    skip_without("accelerate")
    job = run_job(2, "", str(ACCELERATE_SCRIPTS), timeout_s=110.0)
    assert job.status == 0, job.output
    for script in ("test_ops", "test_sync", "test_script"):
        for rank in range(2):
            assert f"PASSED {script} on rank {rank}" in job.output


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


def test_libraries_that_ask_torch_whether_they_are_alone(run_job) -> None:
    """They do not know our functions, and would compute each rank's own result without a word."""
    skip_without("torchmetrics")
    skip_without("accelerate")
    job = run_job(
        2,
        """
        import torch, torchmetrics
        import syncline.collectives as sc
        from accelerate import PartialState
        from syncline.collectives.torch_backend import share_default_group
        from torch.utils.data import DistributedSampler

        sc.init_process_group()
        share_default_group()
        mean = torchmetrics.MeanMetric()
        mean.update(torch.tensor([3.0 + 2 * sc.get_rank()]))
        is_main, share = PartialState(cpu=True).is_main_process, DistributedSampler(range(4), shuffle=False)
        print(f"rank {sc.get_rank()}:", mean.compute().item(), is_main, list(share))
        sc.destroy_process_group()
        """,
    )
    assert job.status == 0, job.output
    assert "rank 0: 4.0 True [0, 2]" in job.output
    assert "rank 1: 4.0 False [1, 3]" in job.output
