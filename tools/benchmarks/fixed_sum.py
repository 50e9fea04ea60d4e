"""Why buckets: what a fixed sum takes in tensors of one size after another, and when gradients are ready."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from syncline.collectives import ProcessGroup

from .cases import Case
from .contenders import NATIVE, OURS
from .summary import Summary
from .timing import Phases, Step, interleaved


def tensor_sizes(total_bytes: int, smallest_bytes: int) -> list[int]:
    """From the smallest on, each four times the one before, up to the total. A pure function."""
    sizes = [smallest_bytes]
    while sizes[-1] < total_bytes:
        sizes.append(min(total_bytes, 4 * sizes[-1]))
    return sizes


def by_tensor_size(total_bytes: int, sizes: Sequence[int], group: ProcessGroup, rounds: int) -> dict[str, dict[int, Summary]]:
    """Seconds to all-reduce so many bytes of float32, all tensors started before the first is waited for. A collective.

    Returns:
        For ours and torch's over Gloo, by the bytes of a tensor.
    """
    plain = torch.zeros(total_bytes // 4)
    own = group.allocate(total_bytes // 4, torch.float32, torch.device("cpu")).zero_()
    reduce: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], object]]] = {
        OURS: (own, functools.partial(group.all_reduce, async_op=True)),
        NATIVE: (plain, functools.partial(dist.all_reduce, async_op=True)),
    }
    steps: dict[str, Step] = {
        f"{name}/{size}": functools.partial(_sum, torch.split(tensor, size // 4), start)
        for name, (tensor, start) in reduce.items()
        for size in sizes
    }
    taken = interleaved(steps, group, rounds, warm_up=1)
    return {name: {size: Summary.of([one.total_s for one in taken[f"{name}/{size}"]]) for size in sizes} for name in reduce}


def _sum(tensors: Sequence[torch.Tensor], start: Callable[[torch.Tensor], object]) -> Phases:
    began = time.perf_counter()
    works = [start(tensor) for tensor in tensors]
    for work in works:
        work.wait()  # type: ignore[attr-defined]  # of torch's works, and ours
    return Phases.undivided(time.perf_counter() - began)


def arrivals(case: Case, rounds: int) -> list[tuple[float, float]]:
    """When the gradients of a model alone are ready: seconds of backward, and the share of the elements until then."""
    model, batch = case.model(), case.batch()
    parameters = list(model.parameters())
    came: list[list[float]] = [[] for _ in parameters]
    for times, parameter in zip(came, parameters, strict=True):
        parameter.register_post_accumulate_grad_hook(functools.partial(_note, times))  # type: ignore[no-untyped-call]  # torch's
    for _ in range(rounds + 1):
        loss = case.loss(model(batch), batch)
        began = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        for times in came:
            times[-1] -= began
    middle = [(statistics.median(times[1:]), parameter.numel()) for times, parameter in zip(came, parameters, strict=True)]
    return shares(sorted(middle))


def _note(times: list[float], _: torch.Tensor) -> None:
    times.append(time.perf_counter())


def shares(arrived: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """From the second and size of each gradient, in order: the second, and the share of all sizes by then. A pure function."""
    total = sum(size for _, size in arrived)
    until = accumulate(size for _, size in arrived)
    return [(second, so_far / total) for (second, _), so_far in zip(arrived, until, strict=True)]
