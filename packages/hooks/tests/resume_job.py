"""One rank of a job under torch's own DistributedDataParallel that trains, saves and resumes; test_resume starts it.

Usage: resume_job.py RANK WORLD_SIZE FOLDER

Trains from step 0 to the end, and leaves checkpoints in FOLDER on the way. Where there is a folder "from" in FOLDER it goes on
from the checkpoints in that, once after a rehearsal and once without; see "Resume" in docs/howto/use-hooks.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline import hooks

SAVED_AT, STEPS = 5, 8
BATCH = 12
CAP_MB = 0.004  # several buckets


class Crossed(torch.nn.Module):
    """Its layers are defined in another order than they are used in, so that DDP orders its buckets anew."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.left = torch.nn.Linear(24, 5), torch.nn.Linear(24, 24)
        self.first, self.right = torch.nn.Linear(12, 24), torch.nn.Linear(24, 24)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = torch.tanh(self.left(hidden)) + torch.tanh(self.right(hidden))
        return self.last(hidden)  # type: ignore[no-any-return]


Named = list[tuple[str, torch.Tensor]]
MakeState = Callable[[Named], Any]


def power(**settings: Any) -> MakeState:
    return lambda named: hooks.PowerSGDState(None, 2, 2, **settings, named_parameters=named)


def compressed(compressor: hooks.Compressor) -> MakeState:
    return lambda named: hooks.CompressionState(compressor, named_parameters=named)


def phases(named: Named) -> hooks.ScheduleState:
    plain, halves = hooks.Phase(0, hooks.allreduce_hook), hooks.Phase(1, hooks.bf16_compress_hook)
    return hooks.ScheduleState([plain, halves, hooks.Phase(2, hooks.powerSGD_hook, power(warm_start=False)(named))])


def local(named: Named) -> hooks.PostLocalSGDState:
    return hooks.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)


def nothing(named: Named) -> None:
    return None


CASES: dict[str, tuple[Any, MakeState]] = {
    "fp16": (hooks.fp16_compress_hook, nothing),
    "power": (hooks.powerSGD_hook, power()),
    "power cold": (hooks.powerSGD_hook, power(warm_start=False)),
    "power same shapes": (hooks.powerSGD_hook, power(batch_tensors_with_same_shape=True)),
    "power in halves": (hooks.bf16_compress_wrapper(hooks.powerSGD_hook), power()),
    "power unnamed": (hooks.powerSGD_hook, lambda named: hooks.PowerSGDState(None, 2, 2)),
    "batched power": (hooks.batched_powerSGD_hook, power()),
    "int8": (hooks.compression_hook, compressed(hooks.Int8())),
    "int8 channels": (hooks.compression_hook, compressed(hooks.Int8(per_channel=True))),
    "one-bit": (hooks.compression_hook, compressed(hooks.OneBit())),
    "top": (hooks.compression_hook, compressed(hooks.TopK(0.1))),
    "random": (hooks.compression_hook, compressed(hooks.RandomK(0.1))),
    "schedule": (hooks.schedule_hook, phases),
    "local": (hooks.post_localSGD_hook, local),
}


@dataclass
class Run:
    """All that a checkpoint is about, freshly built."""

    ddp: torch.nn.parallel.DistributedDataParallel
    optimizer: Any
    state: Any

    @classmethod
    def begin(cls, case: str, seed: int) -> Run:
        torch.manual_seed(seed)
        module = Crossed().double()
        ddp = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=CAP_MB)
        hook, make_state = CASES[case]
        state = make_state(list(module.named_parameters()))
        ddp.register_comm_hook(state, hook)
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        if case == "local":
            optimizer = hooks.PostLocalSGDOptimizer(optimizer, hooks.PeriodicModelAverager(3, 2))
        return cls(ddp, optimizer, state)

    def saved(self) -> dict[str, Any]:
        model, optimizer = self.ddp.module.state_dict(), self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "hook": self.state and self.state.state_dict()}

    def load(self, ranks: list[dict[str, Any]]) -> None:
        """On as many ranks, each takes its own. On more or fewer, all take rank 0's, and the mean of all ranks' errors."""
        is_same_size = len(ranks) == dist.get_world_size()
        own = ranks[dist.get_rank() if is_same_size else 0]
        self.ddp.module.load_state_dict(own["model"])  # after wrapping, which gives all ranks rank 0's
        self.optimizer.load_state_dict(own["optimizer"])
        if self.state is not None:
            self.state.load_state_dict(own["hook"] if is_same_size else hooks.merge_states([r["hook"] for r in ranks]))

    def rehearse(self) -> None:
        """One backward before loading: then DDP orders its buckets before the first real one."""
        self.ddp(torch.ones(1, 12, dtype=torch.float64)).sum().backward()

    def train(self, steps: range) -> list[float]:
        """This rank's losses."""
        rank, size, losses = dist.get_rank(), dist.get_world_size(), []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(BATCH, 12, generator=generator, dtype=torch.float64)[rank::size]
            targets = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)[rank::size]
            self.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self.ddp(inputs), targets)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def found(self, losses: list[float]) -> dict[str, Any]:
        return {"losses": losses, "parameters": [parameter.detach().clone() for parameter in self.ddp.parameters()]}


def whole(case: str, checkpoint: Path) -> dict[str, Any]:
    run = Run.begin(case, seed=0)
    run.train(range(SAVED_AT))
    torch.save(run.saved(), checkpoint)
    return run.found(run.train(range(SAVED_AT, STEPS)))


def resumed(case: str, checkpoints: list[Path], *, rehearses: bool) -> dict[str, Any]:
    run = Run.begin(case, seed=1)
    if rehearses:
        run.rehearse()
    run.load([torch.load(path, weights_only=True) for path in checkpoints])
    return run.found(run.train(range(SAVED_AT, STEPS)))


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    found = {}
    for case in CASES:
        checkpoints = sorted((folder / "from").glob(f"{case}-*.pt"))
        if checkpoints:
            found[case] = resumed(case, checkpoints, rehearses=True)
            found[f"{case}, unrehearsed"] = resumed(case, checkpoints, rehearses=False)
        else:
            found[case] = whole(case, folder / f"{case}-{rank}.pt")
    torch.save(found, folder / f"found-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
