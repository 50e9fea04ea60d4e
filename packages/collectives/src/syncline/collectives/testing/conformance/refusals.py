"""Checks of wrong arguments, which the group must refuse before it communicates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...errors import InvalidArgumentError
from ...group import ProcessGroup
from ...reduce_op import ReduceOp
from ...work import Work
from .values import Check, expect, expect_raises, sum_of_terms, terms


def _refused(group: ProcessGroup, what: str, call: Callable[[], Work], mentions: str) -> None:
    expect_raises(InvalidArgumentError, call, what, mentions)
    expect_raises(InvalidArgumentError, call, what, f"rank {group.rank} of {group.size}")
    tensor = terms((5,), group.rank)
    group.all_reduce(tensor)
    expect(tensor, sum_of_terms((5,), group.size), f"all_reduce after {what} was refused")


def overlapping_memory(group: ProcessGroup) -> None:
    """Check that an output is refused if several of its elements share memory."""
    overlapping = {
        "an expanded tensor": torch.zeros(1, 4).expand(3, 4),
        "an expanded scalar": torch.zeros(()).expand(3),
        "sliding windows": torch.zeros(6).unfold(0, 3, 1),
    }
    for name, tensor in overlapping.items():
        before = tensor.clone()
        outputs = [tensor] * group.size
        _refused(group, f"all_reduce of {name}", partial(group.all_reduce, tensor), "share")
        _refused(group, f"broadcast of {name}", partial(group.broadcast, tensor), "share")
        _refused(group, f"all_gather into {name}", partial(group.all_gather, outputs, before), "share")
        expect(tensor.clone(), before, name)
    if group.size > 1:
        outputs = [torch.empty(3)] * group.size
        _refused(group, "one output for two ranks", partial(group.all_gather, outputs, torch.ones(3)), "share")


def overlapping_parts(group: ProcessGroup) -> None:
    """Check that all_gather_into_tensor and reduce_scatter_tensor refuse a wrong overlap of the two tensors.

    The small tensor may lie inside the large tensor only as this rank's part.
    """
    block = torch.zeros(group.size * 3 + 3)[: group.size * 3]
    across = block.as_strided((3,), (1,), 1)
    _refused(group, "gathering a piece", partial(group.all_gather_into_tensor, block, across), f"part number {group.rank}")
    _refused(group, "scattering to a piece", partial(group.reduce_scatter_tensor, across, block), f"part number {group.rank}")


def overlapping_memory_may_be_read(group: ProcessGroup) -> None:
    """Check that elements of an input may share memory, and that an output of one element may be a result of `expand`."""
    outputs = [torch.empty(3, 4) for _ in range(group.size)]
    group.all_gather(outputs, torch.full((1, 4), float(group.rank)).expand(3, 4))
    for rank, output in enumerate(outputs):
        expect(output, torch.full((3, 4), float(rank)), f"expanded input of rank {rank}")
    single = torch.ones(1).expand(1, 1)
    group.all_reduce(single)
    expect(single, torch.full((1, 1), float(group.size)), "one element in two dimensions")


def wrong_device(group: ProcessGroup) -> None:
    """Check that the group refuses a tensor on a type of device that the group does not serve."""
    meta = torch.empty(3, device="meta")
    cpu = [torch.empty(3) for _ in range(group.size)]
    _refused(group, "all_reduce on meta", partial(group.all_reduce, meta), "meta")
    _refused(group, "broadcast on meta", partial(group.broadcast, meta), "meta")
    _refused(group, "all_gather from meta", partial(group.all_gather, cpu, meta), "meta")
    _refused(group, "all_gather into meta", partial(group.all_gather, [meta] * group.size, cpu[0]), "meta")


def wrong_layout(group: ProcessGroup) -> None:
    """Check that broadcast, and all_reduce with MAX, refuse a sparse tensor."""
    sparse = torch.eye(3).to_sparse()
    _refused(group, "MAX of a sparse tensor", partial(group.all_reduce, sparse, ReduceOp.MAX), "sparse")
    _refused(group, "broadcast of a sparse tensor", partial(group.broadcast, sparse), "sparse")


def no_memory(group: ProcessGroup) -> None:
    """Check that every call refuses a tensor without memory."""
    freed = torch.ones(6)
    freed.untyped_storage().resize_(0)
    transformed: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        transformed.append(tensor)
        return tensor.sum()

    torch.func.grad(keep)(torch.ones(6))
    tensors = {
        "was freed": freed,
        "zero tensors": torch._efficientzerotensor((6,), device=freed.device),
        "torch.func": transformed[0],
        "NestedTensor": torch.nested.nested_tensor([torch.ones(3), torch.ones(3)], layout=torch.jagged),
        "UninitializedParameter": torch.nn.UninitializedParameter(),
    }
    for mentions, tensor in tensors.items():
        for call in _calls_on(group, tensor):
            _refused(group, f"{call.func.__name__} of a tensor without memory ({mentions})", call, mentions)


def _calls_on(group: ProcessGroup, tensor: torch.Tensor) -> list[partial[Work]]:
    size, plain = group.size, torch.ones(6)
    rows, same = [torch.ones(6) for _ in range(size)], [tensor] * size
    other = (group.rank + 1) % size
    return [
        partial(group.all_reduce, tensor),
        partial(group.all_reduce, tensor, async_op=True),
        partial(group.reduce, tensor),
        partial(group.broadcast, tensor),
        partial(group.all_gather, rows, tensor),
        partial(group.all_gather, same, plain, async_op=True),
        partial(group.all_gather_into_tensor, torch.ones(6 * size), tensor),
        partial(group.all_gather_into_tensor, tensor, plain),
        partial(group.gather, tensor, rows if group.rank == 0 else None),
        partial(group.scatter, tensor, rows if group.rank == 0 else None),
        partial(group.reduce_scatter, plain, same),
        partial(group.reduce_scatter, tensor, rows, async_op=True),
        partial(group.reduce_scatter_tensor, plain, tensor),
        partial(group.reduce_scatter_tensor, tensor, torch.ones(6 * size), async_op=True),
        partial(group.all_to_all, rows, same),
        partial(group.all_to_all, same, rows, async_op=True),
        partial(group.all_to_all_single, plain, tensor),
        partial(group.all_to_all_single, tensor, plain, async_op=True),
        *([partial(group.send, tensor, other), partial(group.recv, tensor, other)] if size > 1 else []),
    ]


def wrong_numbers(group: ProcessGroup) -> None:
    """Check that roots, tags, splits and sizes must be integers in range, and that `dtype` must be a dtype of torch."""
    size = group.size
    unchecked: Any = group  # as in a caller's code without types
    for root in (0.5, "0", None):
        _refused(group, f"a root {root!r}", partial(unchecked.reduce, torch.zeros(3), root), f"0..{size - 1}, found {root!r}")
    splits = [6.0] + [0.0] * (size - 1)
    exchange = partial(unchecked.all_to_all_single, torch.zeros(6), torch.zeros(6), splits)
    _refused(group, "splits that are no integers", exchange, "list of integers")
    if size > 1:
        other = (group.rank + 1) % size
        _refused(group, "a tag that is none", partial(unchecked.send, torch.zeros(3), other, 1.5), "found 1.5")
        _refused(group, "nobody to send to", partial(unchecked.send, torch.zeros(3), None), "found None")
    for mentions, numel, dtype in (
        ("found 'float32'", 3, "float32"),
        ("found -1", -1, torch.float32),
        ("found 1.5", 1.5, torch.float32),
        ("63 bits", 2**62, torch.float32),
    ):
        _refused(group, f"allocate, {mentions}", partial(unchecked.allocate, numel, dtype), mentions)


def tensors_that_stand_for_others(group: ProcessGroup) -> None:
    """Check tensors without memory of their own: results of torch's functional collectives, and fake tensors.

    If a call gets the result of a functional collective, the call must first wait for this collective. A call with a fake
    tensor must send nothing.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    size = group.size
    tensor = terms((5,), group.rank)
    group.all_reduce(AsyncCollectiveTensor(tensor))
    expect(tensor, sum_of_terms((5,), size), "all_reduce of an AsyncCollectiveTensor")
    rows = [torch.zeros(5) for _ in range(size)]
    group.all_gather([AsyncCollectiveTensor(row) for row in rows], AsyncCollectiveTensor(terms((5,), group.rank)))
    for rank, row in enumerate(rows):
        expect(row, terms((5,), rank), f"row {rank} of an all_gather into AsyncCollectiveTensors")
    with FakeTensorMode():
        fake = torch.ones(6)
    if group.rank == 0:  # the other ranks need not call
        for call in _calls_on(group, fake):
            if call.func.__name__ not in ("send", "recv"):
                call().wait()
    after = terms((5,), group.rank)
    group.all_reduce(after)
    expect(after, sum_of_terms((5,), size), "all_reduce after calls on fake tensors")


def wrong_root(group: ProcessGroup) -> None:
    """Check that a root outside the group is refused."""
    for root in (-1, group.size, 1000):
        call = partial(group.broadcast, torch.zeros(3), root)
        _refused(group, f"broadcast from rank {root}", call, f"0..{group.size - 1}, found {root}")


def wrong_outputs(group: ProcessGroup) -> None:
    """Check that all_gather refuses a wrong number, shape or dtype of outputs."""
    tensor = torch.zeros(3)

    def gather(outputs: list[torch.Tensor]) -> Callable[[], Work]:
        return partial(group.all_gather, outputs, tensor)

    right = [torch.empty(3) for _ in range(group.size)]
    _refused(group, "an output too many", gather([*right, torch.empty(3)]), f"found {group.size + 1}")
    _refused(group, "an output too few", gather(right[1:]), f"found {group.size - 1}")
    _refused(group, "a wrong shape", gather([*right[1:], torch.empty(4)]), "float32[4]")
    _refused(group, "a wrong number of dimensions", gather([*right[1:], torch.empty(3, 1)]), "float32[3, 1]")
    _refused(group, "a wrong dtype", gather([*right[1:], torch.empty(3).double()]), "float64[3]")


CHECKS: dict[str, Check] = {
    "refuses_overlapping_memory": overlapping_memory,
    "refuses_overlapping_parts": overlapping_parts,
    "reads_overlapping_memory": overlapping_memory_may_be_read,
    "refuses_wrong_device": wrong_device,
    "refuses_wrong_layout": wrong_layout,
    "refuses_tensors_without_memory": no_memory,
    "refuses_wrong_numbers": wrong_numbers,
    "awaits_and_leaves_alone": tensors_that_stand_for_others,
    "refuses_wrong_root": wrong_root,
    "refuses_wrong_outputs": wrong_outputs,
}
