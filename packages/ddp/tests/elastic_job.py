"""One rank of an elastic training over Gloo in which ranks are killed; see `test_elastic_processes`.

The plan is in the folder's "plan.json". Every rank that lives writes what it ended with. The reference trains the same without
kills and without `Elastic`: at each step over a group of the ranks that took part in it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from syncline.collectives import ProcessGroup, destroy_process_group, get_default_group, init_process_group
from syncline.ddp import DistributedDataParallel, Elastic, ElasticSampler

SAMPLES, BATCH_SIZE = 120, 24


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 1, 8, 8, generator=generator), torch.randint(0, 10, (SAMPLES,), generator=generator)
    )


def network() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Flatten(),
        torch.nn.Linear(288, 40),
        torch.nn.ReLU(),
        torch.nn.Linear(40, 10),
    )


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
        found.update(optimizer.state[parameter]["momentum_buffer"].numpy().tobytes())
    return found.hexdigest()


class Killer:
    """Kills this process at its moment of its step; in a shrink, at the first there is."""

    def __init__(self, rank: int, kills: list[list[object]]) -> None:
        self.mine = [(step, moment) for victim, step, moment in kills if victim == rank]
        self.step = 0

    def __call__(self, moment: str, *, at_any_step: bool = False) -> None:
        if any(its == moment and (at_any_step or step == self.step) for step, its in self.mine):
            os.kill(os.getpid(), signal.SIGKILL)


class _DiesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, kill):  # type: ignore[no-untyped-def]
        ctx.kill = kill
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.kill("backward")
        return gradient, None


def instrument(model: DistributedDataParallel, kill: Killer) -> None:
    """Put the moments of death where the script has no line of its own."""
    model.module[2].register_forward_hook(lambda *args: (kill("forward"), _DiesInBackward.apply(args[2], kill))[1])

    def around(owner: object, name: str, before: str, after: str, *, at_any_step: bool = False) -> None:
        inner: Callable[..., object] = getattr(owner, name)

        def called(*args: object, **kwargs: object) -> object:
            kill(before, at_any_step=at_any_step)
            result = inner(*args, **kwargs)
            kill(after, at_any_step=at_any_step)
            return result

        setattr(owner, name, called)

    def each_group(group: ProcessGroup) -> None:
        around(group, "all_reduce", "before the collective", "in the collective")
        around(group, "barrier", "before the barrier", "after the barrier")
        reunion = group._reunion  # type: ignore[attr-defined]
        if not hasattr(reunion, "is_instrumented"):
            reunion.is_instrumented = True
            around(reunion, "connect", "shrink, before connecting", "shrink, after connecting", at_any_step=True)

    each_group(model.join_process_group)
    update = model.update_process_group

    def updated(group: ProcessGroup | None) -> None:
        each_group(get_default_group() if group is None else group)
        kill("before the model is updated", at_any_step=True)
        update(group)

    model.update_process_group = updated  # type: ignore[method-assign]


def elastic_training(rank: int, world_size: int, folder: Path, plan: dict[str, object]) -> dict[str, object]:
    group = init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world_size, timeout=60)
    model = DistributedDataParallel(network(), bucket_cap_mb=0.01, gradient_as_bucket_view=bool(plan["views"]))
    optimizer = optimizer_of(model)
    sampler = ElasticSampler(SAMPLES, BATCH_SIZE, seed=3)
    loader = DataLoader(data(), batch_sampler=sampler, generator=torch.Generator())  # else it draws from that of dropout
    elastic = Elastic(model, optimizer, sampler, patience_s=20, give_up_s=90)
    kill = Killer(rank, plan["kills"])  # type: ignore[arg-type]
    instrument(model, kill)
    sizes: list[int] = []
    torch.manual_seed(100)
    for epoch in range(int(plan["epochs"])):  # type: ignore[call-overload]
        sampler.set_epoch(epoch)
        for images, labels in elastic.batches(loader):
            kill.step = elastic.applied_steps
            size = model.join_process_group.size
            with elastic.step():
                optimizer.zero_grad()
                (F.cross_entropy(model(images), labels) * sampler.weight).backward()
                kill("before the agreement")
                optimizer.step()
                kill("after the step")
                sizes.append(size)
    result = {"digest": digest(model, optimizer), "sizes": sizes, "recovery_s": elastic.recovery_s, "lost": elastic.lost_ranks}
    assert (get_default_group() is group) == (not elastic.lost_ranks)
    destroy_process_group()
    return result


def reference_training(rank: int, world_size: int, folder: Path, plan: dict[str, object]) -> dict[str, object]:
    """Over groups that are made beforehand, with plain DDP and no failure."""
    world = init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world_size, timeout=60)
    sizes: list[int] = plan["sizes"]  # type: ignore[assignment]
    members: list[list[int]] = plan["members"]  # type: ignore[assignment]
    model, optimizer, sampler = None, None, ElasticSampler(SAMPLES, BATCH_SIZE, seed=3)
    module, images_labels, now = network(), data().tensors, []
    torch.manual_seed(100)
    for step in range(len(sizes)):
        if rank not in members[step]:
            break
        if members[step] != now:
            now = members[step]
            group = world.subset(now, f"step-{step}")
            if model is None:
                model = DistributedDataParallel(
                    module, process_group=group, bucket_cap_mb=0.01, gradient_as_bucket_view=bool(plan["views"])
                )
                optimizer = optimizer_of(model)
            else:
                model.update_process_group(group)
            sampler.divide(group.rank, group.size)
        assert model is not None
        assert optimizer is not None
        sampler.load_state_dict({"epoch": step // len(sampler), "applied": step % len(sampler)})
        indices = next(iter(sampler))
        images, labels = (tensor[indices] for tensor in images_labels)
        optimizer.zero_grad()
        (F.cross_entropy(model(images), labels) * sampler.weight).backward()
        optimizer.step()
    assert model is not None
    assert optimizer is not None
    (folder / f"done-{rank}").touch()
    while not all((folder / f"done-{other}").exists() for other in range(world_size)):
        time.sleep(0.05)  # the store and the connections of a rank that leaves are not needed any more
    return {"digest": digest(model, optimizer)}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["SYNCLINE_REPORT_DIR"] = str(folder)
    plan = json.loads((folder / "plan.json").read_text())
    training = reference_training if plan["is_reference"] else elastic_training
    (folder / f"result-{rank}.json").write_text(json.dumps(training(rank, world_size, folder, plan)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
