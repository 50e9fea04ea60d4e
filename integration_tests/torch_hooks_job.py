"""One rank of a job that trains with each of torch's own hooks, under native DDP and under ours, over one Gloo group.

Usage: torch_hooks_job.py RANK WORLD_SIZE FOLDER

Each rank writes `found-RANK.pt`: by hook three lists of all gradients, from native DDP, from ours, and from ours with views of
buckets. For a hook that does not run over Gloo, the error under native DDP.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

from syncline.ddp import DistributedDataParallel

STEPS = 5

_torch_orthogonalize = power._orthogonalize


def _orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
    """torch's batched hook passes one matrix, although torch's function expects a batch of matrices."""
    _torch_orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)


power._orthogonalize = _orthogonalize


def power_state() -> Any:
    return power.PowerSGDState(dist.group.WORLD, 2, start_powerSGD_iter=2)


def local_state() -> Any:
    alone, _ = dist.new_subgroups(1)  # type: ignore[no-untyped-call]
    return local.PostLocalSGDState(dist.group.WORLD, alone, 2)


def group() -> Any:
    return dist.group.WORLD


HOOKS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "allreduce": (default_hooks.allreduce_hook, group),
    "fp16": (default_hooks.fp16_compress_hook, group),
    "bf16": (default_hooks.bf16_compress_hook, group),
    "fp16 wrapper": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), group),
    "bf16 wrapper": (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), group),
    "fp16 wrapped power": (default_hooks.fp16_compress_wrapper(power.powerSGD_hook), power_state),
    "power": (power.powerSGD_hook, power_state),
    "batched power": (power.batched_powerSGD_hook, power_state),
    "int8": (quantization_hooks.quantization_pertensor_hook, group),
    "int8 channels": (quantization_hooks.quantization_perchannel_hook, group),
    "local": (local.post_localSGD_hook, local_state),
    "noop": (debugging_hooks.noop_hook, group),
}
# Their callbacks issue collectives in the order in which they happen to run, which is an error over Gloo. So one bucket.
OF_SEVERAL_COLLECTIVES = {"power", "batched power", "fp16 wrapped power", "int8", "int8 channels"}
# These hooks expect the future of NCCL's all_gather, a list of lists; Gloo's is a plain list.
REFUSED_OVER_GLOO = {"int8", "int8 channels"}


def gradients(wrapper: Any, name: str, rank: int, **settings: Any) -> list[torch.Tensor]:
    hook, make_state = HOOKS[name]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30), torch.nn.Linear(30, 3))
    ddp = wrapper(model, bucket_cap_mb=25 if name in OF_SEVERAL_COLLECTIVES else 0.001, **settings)
    # Without NCCL, torch refuses its bf16 hooks by their name, although they run.
    ddp.register_comm_hook(make_state(), lambda state, bucket: hook(state, bucket))
    generator = torch.Generator().manual_seed(100 + rank)
    found = []
    for _ in range(STEPS):
        inputs, targets = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
        torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            found.append(parameter.grad.clone())
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
    return found


def complaint(name: str, rank: int) -> str:
    try:
        gradients(torch.nn.parallel.DistributedDataParallel, name, rank)
    except RuntimeError as error:
        return str(error)
    return "none"


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    found: dict[str, Any] = {}
    native = torch.nn.parallel.DistributedDataParallel
    for name in HOOKS:
        if name in REFUSED_OVER_GLOO:
            found[name] = complaint(name, rank)
        else:
            found[name] = [gradients(kind, name, rank) for kind in (native, DistributedDataParallel)]
            found[name].append(gradients(DistributedDataParallel, name, rank, gradient_as_bucket_view=True))
    torch.save(found, folder / f"found-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
