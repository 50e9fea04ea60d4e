"""Average the parameters of all replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from syncline.collectives import (
    InvalidArgumentError,
    MisuseError,
    NonMember,
    ProcessGroup,
    ReduceOp,
    TorchGroup,
    as_process_group,
)


class ModelAverager(ABC):
    """The base class of objects that average a model's parameters over a group after some of the optimizer's steps.

    Args:
        process_group: a group of Syncline or torch; None: torch's default group.
        warmup_steps: the number of first steps without averaging.

    Attributes:
        step: the number of calls of `average_parameters` so far. To resume a training, set `step` to the saved number.
    """

    def __init__(self, process_group: Any, warmup_steps: int) -> None:
        if warmup_steps < 0:
            raise InvalidArgumentError(f"expected warmup_steps of 0 or above, found {warmup_steps}")
        self.group = group_of_ranks(process_group)
        self.warmup_steps = warmup_steps
        self.step = 0

    def average_parameters(self, params: Iterable[Any]) -> None:
        """Count an optimizer step, and average the parameters over the group if an average is due after this step.

        Every rank must call this method after every step. As in torch, parameters without a gradient stay unchanged. All ranks
        must have gradients for the same parameters.

        Args:
            params: parameters, or an optimizer's parameter groups.

        Cost of a step that averages: one all_reduce of the parameters for each dtype, and extra memory of the parameters' size.
        """
        group = self._group_of_step()
        if group is not None:
            _average([parameter for parameter in _parameters(params) if parameter.grad is not None], group)
        self.step += 1

    @abstractmethod
    def _group_of_step(self) -> ProcessGroup | None:
        """Return the group that averages after the present step. None: no average is due."""


class PeriodicModelAverager(ModelAverager):
    """Averages a model's parameters over the whole group every `period` steps, beginning with the first step after the warm-up.

    Args:
        period: the number of steps between two averages, 1 or above.
        warmup_steps: the number of first steps without averaging.
        process_group: a group of Syncline or torch; None: torch's default group.

    Raises:
        InvalidArgumentError: the period is below 1, or the warm-up is negative.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: Any = None) -> None:
        if period < 1:
            raise InvalidArgumentError(f"expected a period of 1 step or above, found {period}")
        super().__init__(process_group, warmup_steps)
        self.period = period

    def _group_of_step(self) -> ProcessGroup | None:
        since = self.step - self.warmup_steps
        return self.group if since >= 0 and since % self.period == 0 else None


class HierarchicalModelAverager(ModelAverager):
    """Averages a model often over small groups, less often over larger groups, and least often over the whole group.

    For example, `{2: 4, 8: 16}` averages over 4 ranks every 2 steps, and over all 16 ranks every 8 steps. After step i (counted
    from 0), only the largest period that divides i counts. If no period divides i, nothing is averaged.

    Args:
        period_group_size_dict: for each period (a number of steps), the number of consecutive ranks that average together.
            Periods and sizes are in ascending order. The last size is the size of the whole group, and each other size divides
            it.
        warmup_steps: the number of first steps without averaging.
        process_group: a group of Syncline or torch; None: torch's default group. All ranks of the group must call the
            constructor, which splits the group.

    Source: torch's class of the same name.

    Raises:
        InvalidArgumentError: there is no period, a period is below 1, the periods or sizes have a wrong order, the sizes do not
            fit the group, or the warm-up is negative.
        MisuseError: the group cannot be divided (for example, a `RoundRobinGroup` of torch's groups).
    """

    def __init__(self, period_group_size_dict: Mapping[int, int], warmup_steps: int = 0, process_group: Any = None) -> None:
        super().__init__(process_group, warmup_steps)
        periods, sizes = list(period_group_size_dict), list(period_group_size_dict.values())
        _check_hierarchy(periods, sizes, self.group.size)
        # All ranks make all groups in the same order, because making a group is a collective.
        self._groups = {period: _consecutive(self.group, size) for period, size in period_group_size_dict.items()}

    def _group_of_step(self) -> ProcessGroup | None:
        if self.step < self.warmup_steps:
            return None
        # Periods rise, so the first match in reverse order is the largest period.
        return next((self._groups[period] for period in reversed(self._groups) if self.step % period == 0), None)


def _check_hierarchy(periods: list[int], sizes: list[int], world_size: int) -> None:
    found = f"found periods {periods} and sizes {sizes}"
    if not periods or periods[0] < 1:
        raise InvalidArgumentError(f"expected at least one period, each 1 step or above, {found}")
    if periods != sorted(periods) or sizes != sorted(sizes):
        raise InvalidArgumentError(f"expected periods that rise, and sizes that do not fall, {found}")
    if sizes[-1] != world_size or any(size < 1 or world_size % size for size in sizes):
        raise InvalidArgumentError(
            f"expected sizes that divide the {world_size} ranks of the group, the last of them equal, {found}"
        )


def _consecutive(group: ProcessGroup, size: int) -> ProcessGroup:
    """A collective. Return the group of `size` consecutive ranks that contains this rank."""
    if size == group.size:
        return group
    if not group.can_split:
        # Only torch can divide a group of torch. torch cannot divide a bare backend, because `new_subgroups` doesn't know it.
        divided = group.torch_group if isinstance(group, TorchGroup) else None
        if not isinstance(divided, dist.ProcessGroup):
            raise MisuseError(
                f"expected a group that can be divided, found {group.describe()}; pass a group of torch.distributed, or one of "
                "Syncline's own"
            )
        made, _ = dist.new_subgroups(group_size=size, group=divided)  # type: ignore[no-untyped-call]
        return as_process_group(made)
    part = group.split(group.rank // size)
    assert part is not None
    return part


def group_of_ranks(process_group: Any) -> ProcessGroup:
    """Return `process_group` as a group of Syncline. None means torch's default group.

    Raises:
        MisuseError: the argument is neither a process group nor None, or this rank is not in the group.
    """
    if isinstance(process_group, ProcessGroup):
        return process_group
    NonMember.refuse(process_group)
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise MisuseError(f"expected a process group (syncline's or torch's) or None, found {type(process_group).__name__}")
    return as_process_group(process_group)


def _parameters(params: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for entry in params:
        if isinstance(entry, torch.Tensor):
            found.append(entry)
        elif isinstance(entry, Mapping):
            found.extend(entry["params"])
        else:
            raise MisuseError(f"expected parameters or an optimizer's parameter groups, found {type(entry).__name__}")
    return found


@torch.no_grad()
def _average(parameters: list[torch.Tensor], group: ProcessGroup) -> None:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for members in by_dtype.values():
        # One flat tensor, so that a single all_reduce carries all parameters of a dtype.
        flat = torch.cat([parameter.reshape(-1) for parameter in members])
        group.all_reduce(flat, ReduceOp.AVG)
        for piece, parameter in zip(torch.split(flat, [p.numel() for p in members]), members, strict=True):
            parameter.copy_(piece.view(parameter.shape))
