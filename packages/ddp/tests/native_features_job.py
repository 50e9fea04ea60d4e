"""One rank of a job that plays each scenario under native DDP and under ours, over the same Gloo group, and compares.

Usage: native_features_job.py RANK WORLD_SIZE FOLDER

Each rank writes to a file in the folder, which test_native_features reads: for each scenario how many tensors it compared and
the largest relative difference, or the type of the error that both raised.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _BufferCommHookLocation

from syncline.ddp import DistributedDataParallel, Join

Tensors = list[torch.Tensor]
Wrap = Callable[..., Any]
SHARE = 3


class Network(torch.nn.Module):
    """With running statistics, and experts of which each forward uses another one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.norm = torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.head = torch.nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor, expert: int = -1) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.trunk(inputs)))
        chosen = range(3) if expert < 0 else [expert % 2]
        for number in chosen:
            hidden = torch.tanh(self.experts[number](hidden))
        return self.head(hidden)  # type: ignore[no-any-return]


def batches(rank: int, count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield torch.randn(SHARE, 6, generator=generator)


def gradients(model: torch.nn.Module) -> Tensors:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def state(model: torch.nn.Module) -> Tensors:
    return [value.clone().double() for value in model.state_dict().values()]


def train(model: Any, rank: int, count: int, *, experts: bool = False) -> None:
    # Without momentum where parameters are unused: a joined rank of torch's announces as used what was used in any iteration
    # before, so that gradients are zero instead of None.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if experts else 0.9)
    for step, inputs in enumerate(batches(rank, count)):
        optimizer.zero_grad()
        model(inputs, step + rank if experts else -1).square().mean().backward()
        optimizer.step()


# ---- which backward is reduced ----


def forward_outside_backward_inside(wrap: Wrap, rank: int) -> Tensors:
    model = wrap(Network())
    loss = model(next(batches(rank, 1))).square().mean()
    with model.no_sync():
        loss.backward()
    return gradients(model)


def forward_inside_backward_outside(wrap: Wrap, rank: int) -> Tensors:
    model, found = wrap(Network()), []
    for inputs in batches(rank, 2):
        with model.no_sync():
            loss = model(inputs).square().mean()
        loss.backward()
        found += gradients(model)
    return found


def forwards_on_both_sides(wrap: Wrap, rank: int) -> Tensors:
    """One backward through two forwards, and in the second round two backwards: the first is reduced."""
    model, found = wrap(Network()), []
    for first_inside in (True, False):
        first, second, third, fourth = batches(rank, 4)
        with model.no_sync() if first_inside else nullcontext():
            loss = model(first).square().mean()
        with nullcontext() if first_inside else model.no_sync():
            other = model(second).square().mean()
        (loss + other).backward()
        found += gradients(model)
        loss = model(third).square().mean()
        with model.no_sync():
            other = model(fourth).square().mean()
        other.backward()
        loss.backward()
        found += gradients(model)
    return found


def accumulation_with_errors(wrap: Wrap, rank: int) -> Tensors:
    """Nested, left by an error; and a forward outside that raises does not announce a reduction."""
    model, found = wrap(Network()), []
    try:
        with model.no_sync(), model.no_sync():
            model(next(batches(rank, 1))).square().mean().backward()
            raise ZeroDivisionError
    except ZeroDivisionError:
        found += gradients(model)
    try:
        model(torch.ones(SHARE, 5))
    except RuntimeError:
        pass
    with model.no_sync():
        model(next(batches(rank, 1))).square().mean().backward()
    found += gradients(model)
    model(next(batches(rank, 1))).square().mean().backward()
    return found + gradients(model)


# ---- uneven inputs ----


def joined(options: dict[str, Any], join: dict[str, Any], *, experts: bool = False, hook: bool = False) -> Any:
    def scenario(wrap: Wrap, rank: int) -> Tensors:
        model, found = wrap(Network(), **options), []
        if hook:
            model.register_comm_hook(None, allreduce_hook)
        for least in (0 if "static_graph" not in options else 1, 2):  # rank 0 has no input at all in the first epoch
            with model.join(**join):
                train(model, rank, least + 2 * rank, experts=experts)
            found += state(model)
        return found

    return scenario


def joined_with_accumulation(wrap: Wrap, rank: int) -> Tensors:
    model = wrap(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step, inputs in enumerate(batches(rank, 2 + 4 * rank)):
            with model.no_sync() if step % 2 == 0 else nullcontext():
                model(inputs).square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    return state(model)


def joined_twice_over(wrap: Wrap, rank: int) -> Tensors:
    """Two joinables."""
    first, second = wrap(Network()), wrap(Network())
    context = Join if isinstance(first, DistributedDataParallel) else dist.algorithms.join.Join
    with context([first, second]):
        for inputs in batches(rank, 1 + rank):
            for model in (first, second):
                train(model, rank, 0)
                model.zero_grad()
                model(inputs).square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    return state(first) + state(second)


def early_termination(wrap: Wrap, rank: int) -> Tensors:
    model = wrap(Network())
    with model.join(throw_on_early_termination=True):
        train(model, rank, 1 + rank)
    return []


def join_disabled(wrap: Wrap, rank: int) -> Tensors:
    model = wrap(Network())
    with model.join(enable=False):
        train(model, rank, 2)
    return state(model)


# ---- buffers, optimizers, hooks ----


def add_up_means(group: Any, buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future[Any]]:
    assert list(buffers) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    work = dist.all_reduce(buffers["norm.running_mean"], group=group, async_op=True)
    return [work.get_future()]  # type: ignore[union-attr]


def add_up_means_at_once(group: Any, buffers: dict[str, torch.Tensor]) -> None:
    add_up_means(group, buffers)[0].wait()


def buffer_hook(hook: Any, location: _BufferCommHookLocation) -> Any:
    def scenario(wrap: Wrap, rank: int) -> Tensors:
        model = wrap(Network())
        model._register_buffer_comm_hook(dist.group.WORLD, hook, location)
        train(model, rank, 3)
        return state(model)

    return scenario


def fused(kind: type[torch.optim.Optimizer], **settings: Any) -> Any:
    def scenario(wrap: Wrap, rank: int) -> Tensors:
        model = wrap(Network(), bucket_cap_mb=0.0002)
        model._register_fused_optim(kind, 0.05, **settings)
        for inputs in batches(rank, 4):
            model.zero_grad()
            model(inputs).square().mean().backward()
        return state(model)

    return scenario


def fused_in_part(wrap: Wrap, rank: int) -> Tensors:
    model = wrap(Network())
    model._register_fused_optim(torch.optim.SGD, 0.05, optim_params=list(model.module.head.parameters()))
    model(next(batches(rank, 1))).square().mean().backward()
    return state(model)


def in_backward(wrap: Wrap, rank: int) -> Tensors:
    """torch's DDP needs an accelerator for it; on the CPU an ordinary optimizer is the oracle."""
    model = wrap(Network())
    trunk = list(model.module.trunk.parameters())
    if isinstance(model, DistributedDataParallel):
        _apply_optimizer_in_backward(torch.optim.SGD, trunk, {"lr": 0.05})
    for inputs in batches(rank, 3):
        model.zero_grad()
        model(inputs).square().mean().backward()
        if not isinstance(model, DistributedDataParallel):
            torch.optim.SGD(trunk, lr=0.05).step()
            trunk[0].grad = None
        assert trunk[0].grad is None
    return state(model) + gradients(model)


def builtin(kind: dist.BuiltinCommHookType) -> Any:
    def scenario(wrap: Wrap, rank: int) -> Tensors:
        model = wrap(Network())
        model._register_builtin_comm_hook(kind)
        train(model, rank, 3)
        return state(model)

    return scenario


def another_group(wrap: Wrap, rank: int) -> Tensors:
    """Train on, on a smaller group."""
    model, world_size = wrap(Network()), dist.get_world_size()
    train(model, rank, 2)
    pair = dist.new_group([0, 1])
    if rank < 2:
        model._update_process_group(pair)
        train(model, rank, 2)
    dist.barrier()
    assert world_size >= 2
    return state(model)


UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
SMALL = {"bucket_cap_mb": 0.0002}
BY_ACTIVE = {"divide_by_initial_world_size": False}
SCENARIOS: dict[str, Callable[[Wrap, int], Tensors]] = {
    "forward outside, backward inside": forward_outside_backward_inside,
    "forward inside, backward outside": forward_inside_backward_outside,
    "forwards on both sides": forwards_on_both_sides,
    "accumulation with errors": accumulation_with_errors,
    "join": joined({}, {}),
    "join, small buckets, views": joined({**SMALL, "gradient_as_bucket_view": True}, {}),
    "join, divided by those present": joined({}, BY_ACTIVE),
    "join, unused parameters": joined({**UNUSED, **SMALL}, {}, experts=True),
    "join, static graph": joined({**STATIC, **SMALL}, {}),
    "join, hook": joined(SMALL, {}, hook=True),
    "join, local buffers": joined({"broadcast_buffers": False}, BY_ACTIVE),
    "join, accumulation": joined_with_accumulation,
    "join, two models": joined_twice_over,
    "join, early termination": early_termination,
    "join, disabled": join_disabled,
    "buffer hook before": buffer_hook(add_up_means_at_once, _BufferCommHookLocation.PRE_FORWARD),
    "buffer hook after": buffer_hook(add_up_means, _BufferCommHookLocation.POST_FORWARD),
    "fused SGD": fused(torch.optim.SGD, momentum=0.9),
    "fused Adam": fused(torch.optim.Adam),
    "fused in part": fused_in_part,
    "optimizer in backward": in_backward,
    "built-in ALLREDUCE": builtin(dist.BuiltinCommHookType.ALLREDUCE),
    "built-in FP16_COMPRESS": builtin(dist.BuiltinCommHookType.FP16_COMPRESS),
    "another group": another_group,
}


NATIVE_CANNOT = "torch's own DDP cannot"


def play(scenario: Callable[[Wrap, int], Tensors], kind: type[Any], rank: int) -> Tensors | str:
    torch.manual_seed(7)

    try:
        return scenario(kind, rank)
    except Exception as error:
        if "exhausted" in str(error):
            return "early termination"
        if kind is not DistributedDataParallel and "modified by an inplace operation" in str(error):
            return NATIVE_CANNOT  # an older one changes buffers under the first forward's graph
        raise


def compare(name: str, rank: int) -> dict[str, Any]:
    native = play(SCENARIOS[name], torch.nn.parallel.DistributedDataParallel, rank)
    ours = play(SCENARIOS[name], DistributedDataParallel, rank)
    if isinstance(native, str) or isinstance(ours, str):
        error = native if native in (ours, NATIVE_CANNOT) else None
        return {"tensors": 0, "difference": 0.0 if native == ours else 1.0, "error": error}
    assert len(native) == len(ours), name
    differences = [
        float((theirs - mine).abs().max()) / (float(theirs.abs().max()) or 1.0)
        for theirs, mine in zip(native, ours, strict=True)
    ]
    return {"tensors": len(native), "difference": max(differences), "error": None}


def main() -> None:
    warnings.simplefilter("ignore")  # of native DDP
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    found = {name: compare(name, rank) for name in SCENARIOS}
    (folder / f"compared-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
