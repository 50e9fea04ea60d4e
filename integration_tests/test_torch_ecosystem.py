"""Frameworks, checkpoints and compilation over backend "syncline": as jobs of their own, because they load much."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_support.fixtures import is_installed
from test_support.full_run import cases

pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).parent / "torch_ecosystem.py"
ACCELERATE_SCRIPTS = SCRIPT.with_name("accelerate_scripts.py")
# Each program, and the packages that it needs.
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
    if not is_installed(package):
        pytest.skip(f"{package} is not installed; tools/requirements.txt lists it")


# Accelerate's own scripts run below, and programs on top of each of these in `test_run_programs.py`.
IN_FULL = ("accelerate", "fabric", "lightning_trainer", "transformers_trainer")
USUAL = [program for program in PROGRAMS if program not in IN_FULL]


@pytest.mark.parametrize("program", cases(USUAL, in_full=IN_FULL))
def test_like_gloo(run_job, tmp_path: Path, program: str) -> None:
    skip_without(PROGRAMS[program])
    job = run_job(2, "", str(SCRIPT), program, str(tmp_path))
    assert job.status == 0, job.output
    for rank in range(2):
        assert f"EQUAL {program} on rank {rank}" in job.output


def test_accelerates_own_scripts(run_job) -> None:
    skip_without("accelerate")
    job = run_job(2, "", str(ACCELERATE_SCRIPTS))
    assert job.status == 0, job.output
    for script in ("test_ops", "test_sync", "test_script"):
        for rank in range(2):
            assert f"PASSED {script} on rank {rank}" in job.output


def test_an_uncaught_exception_is_printed(run_job) -> None:
    """torch.distributed puts its excepthook before ours, and would print the exception only after the job's abort."""
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
    """They do not know our functions, and would give each rank's own result without an error."""
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


def test_groups_that_torch_gets_again_and_again_leave_nothing(run_job) -> None:
    """Over MPI, each group that torch gets has a store with a thread and MPI communicators."""
    job = run_job(
        2,
        """
        import threading
        import torch
        import torch.distributed as dist
        import syncline.collectives as sc
        from syncline.collectives.torch_backend import share_default_group

        for _ in range(2):
            sc.init_process_group()
            for _ in range(2):
                share_default_group()
                numbers = torch.tensor([sc.get_rank() + 1.0])
                dist.all_reduce(numbers)
                store = dist.group.WORLD.get_group_store()
                store.set(f"{sc.get_rank()}", "here")
                assert store.get(f"{1 - sc.get_rank()}") == b"here"
                dist.destroy_process_group()
            stores = [thread.name for thread in threading.enumerate() if thread.name.startswith("syncline-store")]
            print(f"rank {sc.get_rank()}:", numbers.item(), len(stores))
            sc.destroy_process_group()
        """,
    )
    assert job.status == 0, job.output
    assert job.output.count("rank 0: 3.0 1") == 2
    assert job.output.count("rank 1: 3.0 0") == 2


# Over a group for each kind of hook, rank 1 makes one step more than rank 0, which calls something else.
FAILED_GRADIENTS = """
import torch
import torch.distributed as dist
import syncline.collectives.torch_backend
from syncline.hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

dist.init_process_group("syncline-mpi", init_method="mpi://")
rank = dist.get_rank()
for name, hook in {"no hook": None, "torch's hook": default_hooks.allreduce_hook, "our hook": allreduce_hook}.items():
    group = dist.new_group()
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(12, 16), process_group=group)
    if hook is not None:
        ddp.register_comm_hook(group, hook)
    for _ in range(2):  # after the first step, torch's DDP broadcasts its new buckets
        ddp(torch.ones(2, 12) * rank).sum().backward()
    try:
        if rank == 1:
            ddp(torch.ones(2, 12)).sum().backward()
        else:
            dist.barrier(group)
    except RuntimeError as error:
        print(f"{name} on rank {rank}: {error}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_failed_all_reduce_is_an_error_of_torchs_ddp(run_job) -> None:
    """C++ code waits for it there; the process continues with its other groups."""
    job = run_job(2, FAILED_GRADIENTS)
    assert job.status == 0, job.output
    for name in ("no hook", "torch's hook", "our hook"):
        told = "".join(job.output.partition(f"{name} on rank 1: ")[2].splitlines(keepends=True)[:4])
        assert "all_reduce(float32[208]" in told
        assert "on rank 1 of 2 in group" in told
        assert "rank 0: barrier()" in told
        assert f"{name} on rank 0: barrier()" in job.output


def test_the_name_that_libraries_know(run_job) -> None:
    """The name of torch's own backend "mpi", which no wheel has."""
    job = run_job(
        2,
        """
        import torch
        import torch.distributed as dist
        from accelerate import Accelerator, PartialState
        from syncline.collectives.torch_backend import init_as_mpi

        init_as_mpi(timeout=40)
        rank, size = dist.get_rank(), dist.get_world_size()
        assert (dist.get_backend(), dist.is_mpi_available()) == ("mpi", True)
        assert dist.distributed_c10d._get_default_group().syncline_group.timeout_s == 40
        tensor = torch.tensor([rank + 1.0])
        for group in (None, dist.new_group([1, 0]), dist.new_group([0, 1]), dist.new_group(backend="gloo")):
            dist.all_reduce(tensor, group=group)
        assert tensor.item() == 3 * 2**3, tensor
        alone = dist.new_group([1])
        if rank == 1:
            dist.all_reduce(tensor, group=alone)
        assert PartialState(cpu=True, backend="mpi").num_processes == size
        model = Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))
        assert type(model) is torch.nn.parallel.DistributedDataParallel
        model(torch.ones(1, 2) * rank).sum().backward()
        assert model.module.weight.grad.tolist() == [[0.5, 0.5]] * 2
        dist.destroy_process_group()
        print(f"as mpi on rank {rank}", flush=True)
        """,
    )
    assert job.status == 0, job.output
    assert "as mpi on rank 0" in job.output
    assert "as mpi on rank 1" in job.output
