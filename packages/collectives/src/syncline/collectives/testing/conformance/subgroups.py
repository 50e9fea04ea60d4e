"""Checks of `split`."""

from __future__ import annotations

from functools import partial

import torch

from ...errors import InvalidArgumentError
from ...group import ProcessGroup
from .values import Check, expect, expect_equal, expect_raises, values


def by_color(group: ProcessGroup) -> None:
    """Check that `split` makes a group of the ranks of one color, in the order of the keys."""
    part = group.split(group.rank % 2, -group.rank)
    assert part is not None
    members = [rank for rank in range(group.size) if rank % 2 == group.rank % 2][::-1]
    expect_equal(part.ranks, tuple(group.ranks[member] for member in members), "ranks of the part")
    expect_equal((part.rank, part.size), (members.index(group.rank), len(members)), "rank and size in the part")
    tensor = torch.tensor([float(group.rank)])
    part.all_reduce(tensor)
    expect(tensor, torch.tensor([float(sum(members))]), "sum within the part")
    part.close()


def without_color(group: ProcessGroup) -> None:
    """Check that a rank without a color joins no group, and that the parent stays usable."""
    part = group.split(None if group.rank == 0 else 0)
    expect_equal(part is None, group.rank == 0, "who is in no group")
    if part is not None:
        expect_equal(part.size, group.size - 1, "size of the rest")
        part.close()
    group.barrier()
    expect_raises(InvalidArgumentError, partial(group.split, -1), "a negative color", "color")


def colors_of_other_types(group: ProcessGroup) -> None:
    """Check that ranks can pass a color as different types of integer: an int on even ranks, a tensor on odd ranks."""
    color: int = 3 if group.rank % 2 == 0 else torch.tensor(3)  # type: ignore[assignment]
    part = group.split(color, torch.tensor(-group.rank))  # type: ignore[arg-type]
    assert part is not None
    expect_equal(part.ranks, tuple(group.ranks[::-1]), "ranks of the part")
    part.close()


def nested_and_together(group: ProcessGroup) -> None:
    """Check `split` of a group that `split` has made, and collectives in flight on a group and its part."""
    part = group.split(0, group.rank)
    assert part is not None
    inner = part.split(part.rank)
    assert inner is not None
    expect_equal((inner.size, inner.ranks), (1, (group.ranks[group.rank],)), "a group of one")
    works, tensors = [], []
    for number in range(12):
        chosen = (group, part)[number % 2]
        tensor = values((1000,), group.rank + number)
        works.append(chosen.all_reduce(tensor, async_op=True))
        tensors.append(tensor)
    for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        total = torch.stack([values((1000,), rank + number) for rank in range(group.size)]).sum(0)
        expect(tensor, total, f"collective {number}")
    inner.close()
    part.close()


CHECKS: dict[str, Check] = {
    "subgroups_by_color": by_color,
    "subgroups_colors_of_other_types": colors_of_other_types,
    "subgroups_without_color": without_color,
    "subgroups_nested_and_together": nested_and_together,
}
