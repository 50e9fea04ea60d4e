"""A rank of an elastic training that loses ranks: `elastic_job.py RANK WORLD_SIZE FOLDER`, `elastic_job.py mpi FOLDER`, or
`elastic_job.py join NUMBER FOLDER` of one that comes later.

The plan is in the folder's "plan.json". Every rank that lives writes what it ended with, and when it did what (`log-RANK`). The
reference trains the same without kills and without `Elastic`: at each step over a group of the ranks that took part in it, and
then once more with all ranks.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from syncline.collectives import ProcessGroup, RankGivenUpError, destroy_process_group, get_default_group, init_process_group
from syncline.collectives.internal import broadcast_object
from syncline.ddp import DistributedDataParallel, Elastic, ElasticSampler

BATCHES = 5  # of an epoch of noise
DIGITS_BATCH_SIZE = 100

Plan = dict[str, Any]


def data_of(plan: Plan) -> tuple[TensorDataset, TensorDataset, int]:
    """What is learnt, what the result is tested with, and the size of a batch: noise, or scikit-learn's digits."""
    if plan.get("data") == "digits":
        digits = load_digits()
        digits = digits[torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))]
        images, labels = (digits[:, :64] / 16).reshape(-1, 1, 8, 8), digits[:, 64].long()
        return TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:]), DIGITS_BATCH_SIZE
    generator = torch.Generator().manual_seed(1)
    noise = TensorDataset(torch.randn(120, 1, 8, 8, generator=generator), torch.randint(0, 10, (120,), generator=generator))
    return noise, noise, 120 // BATCHES


def load_digits() -> torch.Tensor:
    """For each image its 64 pixels, 0 to 16, and its label. scikit-learn's file: to import the package takes seconds."""
    spec = find_spec("sklearn")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    return torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))


def accuracy_percent(model: torch.nn.Module, test: TensorDataset) -> float:
    images, labels = test.tensors
    model.eval()
    with torch.no_grad():
        return 100.0 * (model(images).argmax(1) == labels).float().mean().item()


def network(plan: Plan) -> torch.nn.Module:
    torch.manual_seed(5 + plan.get("seed", 0))
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
    """Kills this process at its moment of its step, or stops it; in a shrink, at the first moment there is."""

    def __init__(self, name: str, plan: Plan, folder: Path) -> None:
        self.mine = [(step, moment) for victim, step, moment in plan["kills"] if str(victim) == name]
        self.signal = signal.SIGSTOP if plan.get("stops") else signal.SIGKILL
        self.note = folder / f"hit-{name}"
        self.step = 0

    def __call__(self, moment: str, *, at_any_step: bool = False) -> None:
        if any(its == moment and (at_any_step or step == self.step) for step, its in self.mine):
            self.mine.clear()
            self.note.write_text(json.dumps({"pid": os.getpid(), "when": time.time()}))
            os.kill(os.getpid(), self.signal)


class _DiesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, kill):  # type: ignore[no-untyped-def]
        ctx.kill = kill
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.kill("backward")
        return gradient, None


def instrument(model: DistributedDataParallel, elastic: Elastic, kill: Killer) -> None:
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
        reconnector = group._reconnector  # type: ignore[attr-defined]
        if not hasattr(reconnector, "is_instrumented"):
            reconnector.is_instrumented = True
            around(reconnector, "_connect", "shrink, before connecting", "shrink, after connecting", at_any_step=True)

    around(elastic, "_sum_over_ranks", "before the sum", "after the sum")
    if model.join_process_group.backend_name == "mpi":
        connecting = import_module("syncline.collectives.transports.mpi.node.hierarchy")  # asks between two collectives
        around(connecting, "find_fence", "shrink, while connecting", "shrink, while connecting", at_any_step=True)
    each_group(model.join_process_group)
    update = model.update_process_group

    def updated(group: ProcessGroup | None) -> None:
        each_group(get_default_group() if group is None else group)
        kill("before the model is updated", at_any_step=True)
        update(group)

    model.update_process_group = updated  # type: ignore[method-assign]


def elastic_training(group: ProcessGroup, folder: Path, plan: Plan, name: str) -> dict[str, object]:
    train, test, batch_size = data_of(plan)
    model = DistributedDataParallel(network(plan), bucket_cap_mb=0.01, gradient_as_bucket_view=bool(plan["views"]))
    optimizer = optimizer_of(model)
    sampler = ElasticSampler(len(train), batch_size, seed=3)
    loader = DataLoader(train, batch_sampler=sampler, generator=torch.Generator())  # else it draws from that of dropout
    elastic = Elastic(
        model, optimizer, sampler, silence_timeout_s=plan.get("silence_timeout_s", 20), give_up_s=90, admit_every=1
    )
    kill = Killer(name, plan, folder)
    instrument(model, elastic, kill)
    members: list[list[int]] = []
    newcomers_at = plan.get("newcomers_at", [])
    if not group.is_waiting:
        torch.manual_seed(100)
    for _ in elastic.epochs(plan["epochs"]):
        for images, labels in elastic.batches(loader):
            kill.step = elastic.applied_steps
            if kill.step in newcomers_at:
                wait_for_newcomer(folder, newcomers_at.index(kill.step), plan["ranks"])
            members_now = list(model.join_process_group.members)
            with elastic.step():
                optimizer.zero_grad()
                (F.cross_entropy(model(images), labels) * sampler.weight).backward()
                kill("before the agreement")
                optimizer.step()
                kill("after the step")
                members.append(members_now)
    result: dict[str, object] = {
        "digest": digest(model, optimizer),
        "members": members,
        "sizes": [len(each) for each in members],
    }
    result |= {"recovery_s": elastic.recovery_s, "lost": elastic.lost_ranks}
    result["began_at"] = elastic.applied_steps - len(members)
    if not newcomers_at:
        assert (get_default_group() is group) == (not elastic.lost_ranks)
    result["accuracy"] = accuracy_percent(model.module, test)
    if plan.get("stops") and get_default_group().rank == 0:
        wake(folder)
    destroy_process_group()
    return result


def die_at(moment: str, group: ProcessGroup) -> None:
    """Kill this newcomer before or after it connects with those that let it in."""
    reconnector = group._reconnector  # type: ignore[attr-defined]
    connect = reconnector._connect

    def dying(*args: object) -> object:
        connected = connect(*args) if moment == "after connecting" else None
        os.kill(os.getpid(), signal.SIGKILL)
        return connected

    reconnector._connect = dying


def wait_for_newcomer(folder: Path, number: int, first_size: int) -> None:
    """So that the newcomer of that number is let in after this very step, if it was not before: it comes when it is called."""
    (folder / f"called-{number}").touch()
    end_s = time.monotonic() + 90
    while not get_default_group().newcomers() and max(get_default_group().members) < first_size + number:
        assert time.monotonic() < end_s
        time.sleep(0.02)


def wake(folder: Path) -> None:
    """Let the ranks that were stopped go on, and wait for what they say."""
    for note in folder.glob("hit-*"):
        os.kill(json.loads(note.read_text())["pid"], signal.SIGCONT)
        given_up = folder / note.name.replace("hit", "given-up")
        end_s = time.monotonic() + 60
        while not given_up.exists():
            assert time.monotonic() < end_s
            time.sleep(0.05)


def reference_training(world: ProcessGroup, plan: Plan, members: Sequence[Sequence[int]], name: str) -> dict[str, object]:
    """Over groups that are made beforehand, with plain DDP and no failure; `members` are those of each step."""
    train, test, batch_size = data_of(plan)
    model, optimizer, sampler = None, None, ElasticSampler(len(train), batch_size, seed=3)
    module, images_labels, now = network(plan), train.tensors, []
    torch.manual_seed(100)
    for step, those in enumerate(members):
        if world.rank not in those:
            if not any(world.rank in later for later in members[step:]):
                break
            continue
        if those != now:
            has_newcomers, is_new, now = bool(set(those) - set(now)) and step > 0, model is None, those
            group = world.subset(now, f"{name}-{step}")
            if model is None:
                first = group if step == 0 else world.subset([world.rank], f"{name}-alone")
                model = DistributedDataParallel(
                    module, process_group=first, bucket_cap_mb=0.01, gradient_as_bucket_view=bool(plan["views"])
                )
                optimizer = optimizer_of(model)
            if has_newcomers:
                assert optimizer is not None
                state = broadcast_object((module.state_dict(), optimizer.state_dict(), torch.get_rng_state()), 0, group=group)
                if is_new:
                    module.load_state_dict(state[0])
                    optimizer.load_state_dict(state[1])
                    torch.set_rng_state(state[2])
            if step > 0:
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
    if model is None or optimizer is None:
        return {}  # it took no part
    return {"digest": digest(model, optimizer), "accuracy": accuracy_percent(module, test)}


def references(world: ProcessGroup, folder: Path, plans: Sequence[Plan]) -> list[dict[str, object]]:
    """Of each plan."""
    results = []
    for number, plan in enumerate(plans):
        result = reference_training(world, plan, plan["members"], f"disturbed-{number}")
        if plan.get("data") == "digits":
            everybody = [list(range(plan.get("ranks", world.size)))] * len(plan["members"])
            result["undisturbed"] = reference_training(world, plan, everybody, f"undisturbed-{number}").get("accuracy")
        results.append(result)
    (folder / f"done-{world.rank}").touch()
    while not all((folder / f"done-{other}").exists() for other in range(world.size)):
        time.sleep(0.05)  # the store and the connections of a rank that leaves are not needed any more
    return results


def main(words: Sequence[str]) -> None:
    torch.set_num_threads(1)
    folder = Path(words[-1])
    os.environ["SYNCLINE_REPORT_DIR"] = str(folder)
    plan = json.loads((folder / "plan.json").read_text())
    # In `references`, a rank may wait for ranks that still run several trainings without it.
    timeout_s = plan.get("timeout_s", 600 if "plans" in plan else 60)
    if words[0] == "mpi":
        group = init_process_group("mpi", timeout=timeout_s)
    elif words[0] == "join":
        os.environ["SYNCLINE_JOIN"] = "1"
        while not (folder / f"called-{int(words[1]) - plan['ranks']}").exists():
            time.sleep(0.05)  # whoever started this process kills it in time
        group = init_process_group("gloo", f"file://{folder}/meeting", timeout=timeout_s)
        if plan.get("newcomer_dies"):
            die_at(plan["newcomer_dies"], group)
    else:
        rank, size = int(words[0]), int(words[1])
        group = init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=size, timeout=timeout_s)
    name = words[1] if words[0] == "join" else str(group.rank)
    logging.basicConfig(filename=folder / f"log-{name}", format="%(created).6f %(message)s")
    logging.getLogger("syncline").setLevel(logging.DEBUG)
    try:
        result = references(group, folder, plan["plans"]) if "plans" in plan else elastic_training(group, folder, plan, name)
    except RankGivenUpError as error:
        (folder / f"given-up-{name}").write_text(str(error))
        raise
    (folder / f"result-{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
