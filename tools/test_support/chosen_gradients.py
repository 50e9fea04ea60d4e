"""Parameters and a loss whose gradients, and the order of these gradients, the test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from syncline.collectives import ProcessGroup, ReduceOp, Work
from syncline.reducer import Reducer

GRAPHS = {"complete": {}, "static": {"static_graph": True}, "find-unused": {"find_unused_parameters": True}}
ONE_EACH = 0  # a cap of 0 bytes: every parameter has a bucket to itself
PAIRS = 32  # of two elements of float64: two parameters in each bucket
FORWARD, REVERSED = [0, 1, 2, 3], [3, 2, 1, 0]


class CountingGroup:
    """A group that notes the dtypes of the all_reduces that were issued."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.dtypes: list[torch.dtype] = []

    @property
    def issued(self) -> int:
        """How many all_reduces were issued."""
        return len(self.dtypes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False) -> Work:
        """Note the dtype, and call the group."""
        self.dtypes.append(tensor.dtype)
        return self._group.all_reduce(tensor, op, async_op=async_op)


def make_parameters(count: int = 4) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"p{i}", torch.nn.Parameter(torch.ones(2, dtype=torch.float64))) for i in range(count)]


def coefficient(rank: int, index: int, step: int) -> float:
    return (rank + 1.0) * (index + 1) + 100 * step


def average(world_size: int, index: int, step: int) -> list[float]:
    return [sum(coefficient(rank, index, step) for rank in range(world_size)) / world_size] * 2


def loss(parameters: Sequence[tuple[str, torch.nn.Parameter]], rank: int, step: int, arrival: Sequence[int]) -> torch.Tensor:
    """Its gradients are the coefficients, and arrive in this order: autograd visits the latest node first."""
    total = torch.zeros((), dtype=torch.float64)
    for index in reversed(arrival):
        total = total + (parameters[index][1] * coefficient(rank, index, step)).sum()
    return total


def forward(
    reducer: Reducer,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    group: ProcessGroup,
    step: int,
    arrival: Sequence[int],
) -> torch.Tensor:
    """A loss whose backward is reduced."""
    reducer.prepare_for_backward()
    return loss(parameters, group.rank, step, arrival)


def set_to_none(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """As `zero_grad()` does."""
    for _, parameter in parameters:
        parameter.grad = None


def train(
    reducer: Reducer,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    group: ProcessGroup,
    arrivals: Sequence[Sequence[int]],
    *,
    first_step: int = 0,
    before: Callable[[int], None] | None = None,
) -> None:
    """Steps, each of which must give the averages."""
    for step, arrival in enumerate(arrivals, first_step):
        set_to_none(parameters)
        if before is not None:
            before(step)
        forward(reducer, parameters, group, step, arrival).backward()  # type: ignore[no-untyped-call]
        for index, (_, parameter) in enumerate(parameters):
            assert parameter.grad is not None
            assert parameter.grad.tolist() == average(group.size, index, step), (step, index)
