"""One rank of a job under our DDP over MPI that trains with a hook, saves its state, and resumes.

Usage: mpiexec -n N python resuming_job.py FOLDER [CHECKPOINTS]

Without CHECKPOINTS it trains from step 0 to the end, and saves a checkpoint of each rank in FOLDER on the way. With CHECKPOINTS
it continues from there. Rank 0 writes `found.pt` in FOLDER: for each hook the losses of the last steps and the parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from syncline.collectives import ProcessGroup, ReduceOp, destroy_process_group, init_process_group
from syncline.ddp import DistributedDataParallel
from syncline.hooks import (
    CompressionState,
    Int8,
    Phase,
    PowerSGDState,
    RandomK,
    ScheduleState,
    allreduce_hook,
    batched_powerSGD_hook,
    compression_hook,
    merge_states,
    powerSGD_hook,
    schedule_hook,
)

SAVED_AT, STEPS = 4, 6
BATCH = 12
CAP_MB = 0.004  # several buckets

Named = list[tuple[str, torch.Tensor]]
HOOKS: dict[str, tuple[Any, Callable[[Named], Any]]] = {
    "power": (powerSGD_hook, lambda named: PowerSGDState(None, 2, 2, named_parameters=named)),
    "batched power": (batched_powerSGD_hook, lambda named: PowerSGDState(None, 2, 2, named_parameters=named)),
    "int8": (compression_hook, lambda named: CompressionState(Int8(), named_parameters=named)),
    "random": (compression_hook, lambda named: CompressionState(RandomK(0.1), named_parameters=named)),
    "schedule": (
        schedule_hook,
        lambda named: ScheduleState(
            [Phase(0, allreduce_hook), Phase(1, powerSGD_hook, PowerSGDState(None, 2, 2, named_parameters=named))]
        ),
    ),
}


class Crossed(torch.nn.Module):
    """Its layers are defined in another order than they are used, so that DDP reorders its buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = torch.nn.Linear(24, 5), torch.nn.Linear(24, 24), torch.nn.Linear(12, 24)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(inputs)))))  # type: ignore[no-any-return]


def step(model: DistributedDataParallel, number: int, group: ProcessGroup) -> float:
    """Take a step; returns the mean of all ranks' losses."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(BATCH, 12, generator=generator, dtype=torch.float64)[group.rank :: group.size]
    targets = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)[group.rank :: group.size]
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
        mean = loss.clone()
        group.all_reduce(mean, ReduceOp.AVG)
    return float(mean)


def train(name: str, group: ProcessGroup, folder: Path, checkpoints: list[Path]) -> dict[str, Any]:
    hook, make_state = HOOKS[name]
    torch.manual_seed(len(checkpoints))
    module = Crossed().double()
    state = make_state(list(module.named_parameters()))
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=CAP_MB)
    model.register_comm_hook(state, hook)
    if not checkpoints:
        for number in range(SAVED_AT):
            step(model, number, group)
        torch.save({"model": module.state_dict(), "hook": state.state_dict()}, folder / f"{name}-{group.rank}.pt")
    else:
        step(model, 0, group)  # the rehearsal: it lets DDP reorder its buckets before the first real step
        ranks = [torch.load(path, weights_only=True) for path in checkpoints]
        is_same_size = len(ranks) == group.size
        module.load_state_dict(ranks[0]["model"])
        state.load_state_dict(ranks[group.rank]["hook"] if is_same_size else merge_states([r["hook"] for r in ranks]))
    losses = [step(model, number, group) for number in range(SAVED_AT, STEPS)]
    return {"losses": losses, "parameters": [parameter.detach() for parameter in module.parameters()]}


def main() -> None:
    folder, source = Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]]
    torch.set_num_threads(1)
    group = init_process_group("mpi", timeout=60)
    found = {name: train(name, group, folder, sorted(p for s in source for p in s.glob(f"{name}-*.pt"))) for name in HOOKS}
    if group.rank == 0:
        torch.save(found, folder / "found.pt")
    destroy_process_group()


if __name__ == "__main__":
    main()
