"""One rank of a job under torch's own DistributedDataParallel; test_native_ddp starts it, and reads the file it writes.

Usage: native_ddp_job.py RANK WORLD_SIZE FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from syncline import hooks
from syncline.collectives import as_process_group

STEPS = 10
SHARE = 4
HOOKS: dict[str, Any] = {
    "none": None,
    "torch-allreduce": default_hooks.allreduce_hook,
    "torch-fp16": default_hooks.fp16_compress_hook,
    "allreduce": hooks.allreduce_hook,
    "fp16": hooks.fp16_compress_hook,
    "bf16": hooks.bf16_compress_hook,
    # Under another name than the one that torch refuses without NCCL.
    "torch-bf16": lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket),
    "wrapped-fp16": hooks.fp16_compress_wrapper(hooks.allreduce_hook),
    "wrapped-bf16": hooks.bf16_compress_wrapper(hooks.allreduce_hook),
    "torch-wraps-ours": default_hooks.fp16_compress_wrapper(hooks.allreduce_hook),
    "ours-wraps-torch": hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    "noop": hooks.noop_hook,
}
COMPRESSORS = {
    "int8": hooks.Int8(),
    "one-bit": hooks.OneBit(),
    "top": hooks.TopK(0.1),
    "random": hooks.RandomK(0.1),
}


def gradients(hook: Any, state: Any, rank: int) -> list[list[torch.Tensor]]:
    """All gradients of a few steps of training."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    # Small buckets, so that a hook is called more than once in a backward.
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0005)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(100 + rank)
    history = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = torch.randn(SHARE, 6, generator=generator), torch.randn(SHARE, 3, generator=generator)
        torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
        history.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        optimizer.step()
    return history


def diloco_parameters(group: Any, rank: int, sync_every: int) -> list[list[torch.Tensor]]:
    """All parameters after eight steps of DiLoCo on data of this rank's own."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer = hooks.DiLoCoOptimizer(inner, model.named_parameters(), group, sync_every=sync_every)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(SHARE, 6, generator=generator)).square().sum().backward()
        optimizer.step()
    return [[parameter.detach().clone() for parameter in model.parameters()]]


def averaged_parameters(group: Any, rank: int) -> list[list[torch.Tensor]]:
    """A parameter after each of five steps. Every rank sets it to its own number, and two steps average over all ranks."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    averager = hooks.HierarchicalModelAverager({1: 1, 4: dist.get_world_size()}, 0, group)
    history = []
    for step in range(5):
        parameter.data.fill_(10.0 * step + rank)
        averager.average_parameters([parameter])
        history.append([parameter.detach().clone()])
    return history


def all_gradients(rank: int) -> dict[str, list[list[torch.Tensor]]]:
    """By the hook's name; ours also with the group as the state."""
    found = {name: gradients(hook, None, rank) for name, hook in HOOKS.items()}
    found["allreduce-group"] = gradients(hooks.allreduce_hook, dist.group.WORLD, rank)
    found["fp16-group"] = gradients(hooks.fp16_compress_hook, dist.group.WORLD, rank)
    for name, compressor in COMPRESSORS.items():
        found[name] = gradients(hooks.compression_hook, hooks.CompressionState(compressor), rank)
    low_rank = hooks.PowerSGDState(None, 1, 0, use_error_feedback=False, warm_start=False)
    phases = [hooks.Phase(0, hooks.allreduce_hook), hooks.Phase(1, hooks.powerSGD_hook, low_rank)]
    found["schedule"] = gradients(hooks.schedule_hook, hooks.ScheduleState(phases), rank)
    local = hooks.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
    found["post-local"] = gradients(hooks.post_localSGD_hook, local, rank)
    found["diloco"] = diloco_parameters(None, rank, 4)
    found["diloco-group"] = diloco_parameters(dist.group.WORLD, rank, 4)
    found["diloco-not-synchronised"] = diloco_parameters(None, rank, 9)
    found["averaged"] = averaged_parameters(None, rank)
    found["averaged-group"] = averaged_parameters(dist.group.WORLD, rank)
    found["averaged-wrapped"] = averaged_parameters(as_process_group(dist.group.WORLD), rank)
    return found


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    torch.save(all_gradients(rank), folder / f"gradients-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
