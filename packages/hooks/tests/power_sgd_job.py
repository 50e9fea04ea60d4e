"""One rank under torch's own DistributedDataParallel: PowerSGD, ours and torch's; test_power_sgd_native_ddp starts it.

Usage: power_sgd_job.py RANK WORLD_SIZE FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

from syncline import hooks

STEPS = 10
SHARE = 8
START = 2

_torch_orthogonalize = theirs._orthogonalize


def _orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
    """torch's batched hook passes one matrix where its own function expects a batch of them."""
    _torch_orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)


theirs._orthogonalize = _orthogonalize


def layers() -> list[torch.nn.Module]:
    hidden = [layer for _ in range(2) for layer in (torch.nn.Linear(48, 48), torch.nn.Tanh())]
    return [torch.nn.Linear(24, 48), torch.nn.Tanh(), *hidden, torch.nn.Linear(48, 10)]


def gradients(hook: Any, state: Any, rank: int, *, bucket_cap_mb: float, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*layers()).to(dtype)
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(100 + rank)
    history = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(SHARE, 24, generator=generator).to(dtype)
        targets = torch.randn(SHARE, 10, generator=generator).to(dtype)
        torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
        history.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        optimizer.step()
    return history


CASES: dict[str, dict[str, Any]] = {
    "rank-1": {"matrix_approximation_rank": 1},
    "rank-2": {"matrix_approximation_rank": 2},
    "rank-4": {"matrix_approximation_rank": 4, "min_compression_rate": 1.5},
    "batched-shapes": {"matrix_approximation_rank": 2, "batch_tensors_with_same_shape": True},
    "epsilon": {"matrix_approximation_rank": 2, "orthogonalization_epsilon": 1e-10},
    "cold": {"matrix_approximation_rank": 2, "warm_start": False},
    "no-feedback": {"matrix_approximation_rank": 2, "use_error_feedback": False},
    "seed": {"matrix_approximation_rank": 2, "random_seed": 12345},
}


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    group = dist.group.WORLD
    found: dict[str, Any] = {}
    # One bucket for torch's hook: its callbacks issue collectives in whatever order they run, which Gloo does not forgive.
    one = {"bucket_cap_mb": 25.0, "dtype": torch.float64}
    found["none"] = gradients(default_hooks.allreduce_hook, None, rank, **one)
    for case, settings in CASES.items():
        for variant in ("powerSGD_hook", "batched_powerSGD_hook"):
            state = theirs.PowerSGDState(group, start_powerSGD_iter=START, **settings)
            found[f"torch {variant} {case}"] = gradients(getattr(theirs, variant), state, rank, **one)
            mine = hooks.PowerSGDState(group, start_powerSGD_iter=START, **settings)
            found[f"ours {variant} {case}"] = gradients(getattr(hooks, variant), mine, rank, **one)
            found[f"stats {variant} {case}"] = [state.compression_stats(), mine.compression_stats()]
    many = {"bucket_cap_mb": 0.01, "dtype": torch.float64}
    for variant in ("powerSGD_hook", "batched_powerSGD_hook"):
        mine = hooks.PowerSGDState(None, 2, START)
        found[f"many buckets {variant}"] = gradients(getattr(hooks, variant), mine, rank, **many)
        mine = hooks.PowerSGDState(None, 2, START)
        wrapped = hooks.bf16_compress_wrapper(getattr(hooks, variant))
        found[f"halves {variant}"] = gradients(wrapped, mine, rank, bucket_cap_mb=0.01, dtype=torch.float32)
    torch.save(found, folder / f"found-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
