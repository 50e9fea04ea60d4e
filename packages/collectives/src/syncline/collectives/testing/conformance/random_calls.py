"""Checks of random sequences of calls, on the group and on groups of its ranks.

All ranks issue the same calls, but wait for asynchronous calls in different orders.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...api.coalescing import all_reduce_coalesced
from ...api.objects import all_gather_object, broadcast_object_list
from ...group import ProcessGroup
from ...reduce_op import ReduceOp
from ...work import Work
from .values import Check, CheckError, Laid, Layout, expect_equal

_CALLS = 40
_MOST_PENDING = 6
_SIZES = [0, 1, 1, 2, 3, 5, 17, 64, 64, 1000, 1000, 5000, 20_000, 70_000, 140_000]
_DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8]
_LAYOUTS = ["plain", "plain", "window", "window", "part of a window", "offset", "strided", "transposed"]


def _layout(name: str, shape: Sequence[int]) -> Layout:
    count, axes = math.prod(shape), range(len(shape))
    layouts = (
        Layout("plain", tuple(shape)),
        Layout("window", (count,), lambda block: block.view(*shape)),
        Layout("part of a window", (count + 3,), lambda block: block[3:].view(*shape)),
        Layout("offset", (count + 5,), lambda block: block[2:-3].view(*shape)),
        Layout("strided", (*shape, 2), lambda block: block[..., 1]),
        Layout("transposed", tuple(reversed(shape)), lambda block: block.permute(*reversed(axes))),
    )
    return next(layout for layout in layouts if layout.name == name)


@dataclass
class _Pending:
    text: str
    finish: Callable[[], object]
    expected: Sequence[tuple[Laid, torch.Tensor]]


_Issued = tuple[Callable[[], object], Sequence[tuple[Laid, torch.Tensor]]]


@dataclass
class _Drawn:
    """The random choices for one call, the same on every rank."""

    pick: random.Random = field(repr=False)
    shape: list[int]
    dtype: torch.dtype
    root: int
    is_async: bool


@dataclass
class _Caller:
    """Issues random calls on one rank.

    Attributes:
        groups: the groups by name. None: this rank is in no group of this name.
        roots: for each name, the size of the smallest group with this name. Only ranks below this size become roots.
        pick: a random generator, in the same state on every rank.
        own: a random generator, in another state on each rank.
    """

    group: ProcessGroup
    groups: dict[str, ProcessGroup | None]
    roots: dict[str, int]
    pick: random.Random
    own: random.Random
    pending: list[_Pending] = field(default_factory=list)
    number: int = 0
    layout: str = "plain"

    def values(self, rank: int, shape: Sequence[int], dtype: torch.dtype, part: int = 0) -> torch.Tensor:
        """Return a rank's input for a call: small integers, whose sum is exact in every dtype."""
        count = torch.Size(shape).numel()
        numbers = torch.arange(count) * (rank + 2) + rank * 5 + self.number * 3 + part * 7
        return (numbers % 4).view(*shape).to(dtype)

    def place(self, values: torch.Tensor, group: ProcessGroup, *, is_alike: bool = True) -> Laid:
        """Make a tensor with these values, in a random layout.

        If `is_alike`, all ranks make a tensor of this size, in the same layout. Then the layout may be in a window: memory that
        `group` allocates.
        """
        name = self.layout if is_alike else self.own.choice(["plain", "offset", "strided", "transposed"])
        layout, block = _layout(name, values.shape), None
        if "window" in name:
            block = group.allocate(math.prod(layout.block_shape), values.dtype, torch.get_default_device())
        return Laid(layout, values, block)

    def shape(self) -> list[int]:
        count = self.pick.choice(_SIZES)
        return [count] if self.pick.random() < 0.6 else [count // 2, 2] if self.pick.random() < 0.6 else [2, count // 4, 2]

    # ---- calls ----

    def issue(self) -> None:
        self.number += 1
        name = self.pick.choice(["all", "all", "all", *self.groups])
        kind = self.pick.choice([key for key in dir(self) if key.startswith("call_")])
        shape, dtype, is_async = self.shape(), self.pick.choice(_DTYPES), self.pick.random() < 0.5
        root, state = self.pick.randrange(self.roots[name]), self.pick.getrandbits(32)
        self.layout = self.pick.choice(_LAYOUTS)
        group = self.groups[name]
        if group is not None:
            drawn = _Drawn(random.Random(state), shape, dtype, root, is_async)
            finish, expected = getattr(self, kind)(group, drawn)
            self.pending.append(_Pending(f"{kind} number {self.number} on '{name}', {self.layout}: {drawn}", finish, expected))
        while self.pending and (not is_async or len(self.pending) > _MOST_PENDING or self.own.random() < 0.2):
            self.wait(self.own.randrange(len(self.pending)))

    def wait(self, index: int) -> None:
        call = self.pending.pop(index)
        try:
            call.finish()
            for place, expected in call.expected:
                place.expect(expected)
        except CheckError as error:
            raise CheckError(f"rank {self.group.rank}: {call.text}: {error}") from error

    def _op(self, pick: random.Random, dtype: torch.dtype, size: int) -> ReduceOp:
        ops = [ReduceOp.SUM, ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT]
        # A backend may divide before or after the sum, so let the division be exact.
        has_average = dtype.is_floating_point and size in (1, 2, 4, 8)
        return pick.choice([*ops, ReduceOp.AVG] if has_average else ops)

    def _combined(self, op: ReduceOp, tensors: list[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack([tensor.double() for tensor in tensors])
        result = {
            ReduceOp.SUM: lambda: stacked.sum(0),
            ReduceOp.AVG: lambda: stacked.mean(0),
            ReduceOp.MAX: lambda: stacked.amax(0),
            ReduceOp.MIN: lambda: stacked.amin(0),
            ReduceOp.PRODUCT: lambda: stacked.prod(0),
        }[op]()
        return result.to(tensors[0].dtype)

    @staticmethod
    def _finish(work: Work, own: random.Random) -> Callable[[], object]:
        return work.wait if own.random() < 0.7 else work.get_future().wait

    def call_all_reduce(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        op = self._op(drawn.pick, drawn.dtype, group.size)
        mine = self.place(self.values(group.rank, drawn.shape, drawn.dtype), group)
        work = group.all_reduce(mine.tensor, op, async_op=drawn.is_async)
        inputs = [self.values(rank, drawn.shape, drawn.dtype) for rank in range(group.size)]
        return self._finish(work, self.own), [(mine, self._combined(op, inputs))]

    def call_coalesced(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        op, shapes = self._op(drawn.pick, drawn.dtype, group.size), [drawn.shape, [3], [0], [4, 2]]
        mine = [self.place(self.values(group.rank, each, drawn.dtype, part), group) for part, each in enumerate(shapes)]
        work = all_reduce_coalesced([each.tensor for each in mine], op, group, async_op=drawn.is_async)
        expected = [
            self._combined(op, [self.values(rank, each, drawn.dtype, part) for rank in range(group.size)])
            for part, each in enumerate(shapes)
        ]
        return self._finish(work, self.own) if work is not None else (lambda: None), list(zip(mine, expected, strict=True))

    def call_reduce(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        op = self._op(drawn.pick, drawn.dtype, group.size)
        before = self.values(group.rank, drawn.shape, drawn.dtype)
        mine = self.place(before, group)
        work = group.reduce(mine.tensor, drawn.root, op, async_op=drawn.is_async)
        inputs = [self.values(rank, drawn.shape, drawn.dtype) for rank in range(group.size)]
        return self._finish(work, self.own), [(mine, self._combined(op, inputs) if group.rank == drawn.root else before)]

    def call_broadcast(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        mine = self.place(self.values(group.rank, drawn.shape, drawn.dtype), group)
        work = group.broadcast(mine.tensor, drawn.root, async_op=drawn.is_async)
        return self._finish(work, self.own), [(mine, self.values(drawn.root, drawn.shape, drawn.dtype))]

    def call_all_gather(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        before = self.values(group.rank, drawn.shape, drawn.dtype)
        mine, outputs = self.place(before, group), [self.place(torch.zeros_like(before), group) for _ in range(group.size)]
        work = group.all_gather([each.tensor for each in outputs], mine.tensor, async_op=drawn.is_async)
        expected = [(each, self.values(rank, drawn.shape, drawn.dtype)) for rank, each in enumerate(outputs)]
        return self._finish(work, self.own), [(mine, before), *expected]

    def call_all_gather_into_tensor(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        before = self.values(group.rank, drawn.shape, drawn.dtype)
        expected = torch.stack([self.values(rank, drawn.shape, drawn.dtype) for rank in range(group.size)])
        mine, output = self.place(before, group), self.place(torch.zeros_like(expected), group)
        work = group.all_gather_into_tensor(output.tensor, mine.tensor, async_op=drawn.is_async)
        return self._finish(work, self.own), [(mine, before), (output, expected)]

    def call_gather(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        before = self.values(group.rank, drawn.shape, drawn.dtype)
        mine, is_root = self.place(before, group), group.rank == drawn.root
        outputs = [self.place(torch.zeros_like(before), group, is_alike=False) for _ in range(group.size if is_root else 0)]
        work = group.gather(
            mine.tensor, [each.tensor for each in outputs] if is_root else None, drawn.root, async_op=drawn.is_async
        )
        return self._finish(work, self.own), [
            (mine, before),
            *((each, self.values(rank, drawn.shape, drawn.dtype)) for rank, each in enumerate(outputs)),
        ]

    def call_scatter(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        expected = self.values(drawn.root, drawn.shape, drawn.dtype, group.rank)
        mine, is_root = self.place(torch.zeros_like(expected), group), group.rank == drawn.root
        inputs = [
            self.place(self.values(drawn.root, drawn.shape, drawn.dtype, rank), group, is_alike=False)
            for rank in range(group.size if is_root else 0)
        ]
        work = group.scatter(
            mine.tensor, [each.tensor for each in inputs] if is_root else None, drawn.root, async_op=drawn.is_async
        )
        return self._finish(work, self.own), [
            (mine, expected),
            *((each, self.values(drawn.root, drawn.shape, drawn.dtype, rank)) for rank, each in enumerate(inputs)),
        ]

    def call_reduce_scatter(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        op, ranks = self._op(drawn.pick, drawn.dtype, group.size), range(group.size)
        shapes = [[rank + 1, 3] for rank in ranks] if drawn.pick.random() < 0.3 else [drawn.shape] * group.size
        inputs = [self.place(self.values(group.rank, shapes[part], drawn.dtype, part), group) for part in ranks]
        expected = self._combined(op, [self.values(rank, shapes[group.rank], drawn.dtype, group.rank) for rank in ranks])
        mine = self.place(torch.zeros_like(expected), group, is_alike=False)
        work = group.reduce_scatter(mine.tensor, [each.tensor for each in inputs], op, async_op=drawn.is_async)
        return self._finish(work, self.own), [
            (mine, expected),
            *((each, self.values(group.rank, shapes[part], drawn.dtype, part)) for part, each in enumerate(inputs)),
        ]

    def call_reduce_scatter_tensor(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        op, whole = self._op(drawn.pick, drawn.dtype, group.size), [group.size, *drawn.shape]
        before = self.values(group.rank, whole, drawn.dtype)
        expected = self._combined(op, [self.values(rank, whole, drawn.dtype)[group.rank] for rank in range(group.size)])
        tensor, output = self.place(before, group), self.place(torch.zeros_like(expected), group)
        work = group.reduce_scatter_tensor(output.tensor, tensor.tensor, op, async_op=drawn.is_async)
        return self._finish(work, self.own), [(tensor, before), (output, expected)]

    def call_all_to_all(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        count, ranks = max(drawn.shape), range(group.size)

        def sent(source: int, target: int) -> torch.Tensor:
            return self.values(source, [(count + source * 3 + target) % (count + 2)], drawn.dtype, target)

        inputs = [self.place(sent(group.rank, target), group, is_alike=False) for target in ranks]
        outputs = [self.place(torch.zeros_like(sent(source, group.rank)), group, is_alike=False) for source in ranks]
        work = group.all_to_all([each.tensor for each in outputs], [each.tensor for each in inputs], async_op=drawn.is_async)
        return self._finish(work, self.own), [
            *((each, sent(source, group.rank)) for source, each in enumerate(outputs)),
            *((each, sent(group.rank, target)) for target, each in enumerate(inputs)),
        ]

    def call_all_to_all_single(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        count, ranks = max(drawn.shape) // 4, range(group.size)

        def sent(source: int, target: int) -> torch.Tensor:
            return self.values(source, [(count + source * 3 + target) % (count + 2), 2], drawn.dtype, target)

        before = torch.cat([sent(group.rank, target) for target in ranks])
        expected = torch.cat([sent(source, group.rank) for source in ranks])
        tensor, output = (self.place(each, group, is_alike=False) for each in (before, torch.zeros_like(expected)))
        work = group.all_to_all_single(
            output.tensor,
            tensor.tensor,
            [len(sent(source, group.rank)) for source in ranks],
            [len(sent(group.rank, target)) for target in ranks],
            async_op=drawn.is_async,
        )
        return self._finish(work, self.own), [(tensor, before), (output, expected)]

    def call_barrier(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        return self._finish(group.barrier(async_op=drawn.is_async), self.own), []

    def call_ring(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        step = drawn.pick.randrange(1, 1 + max(1, group.size - 1))
        tag = 0 if group.backend_name == "nccl" else drawn.pick.randrange(5)  # NCCL has no tags
        if group.size == 1:
            return (lambda: None), []
        source, target = (group.rank - step) % group.size, (group.rank + step) % group.size
        before, expected = self.values(group.rank, drawn.shape, drawn.dtype), self.values(source, drawn.shape, drawn.dtype)
        mine, output = self.place(before, group), self.place(torch.zeros_like(expected), group)
        works = [group.send(mine.tensor, target, tag, async_op=True), group.recv(output.tensor, source, tag, async_op=True)]
        return (lambda: [work.wait() for work in works]), [(mine, before), (output, expected)]

    def call_objects(self, group: ProcessGroup, drawn: _Drawn) -> _Issued:
        def of(rank: int) -> Any:
            return {"rank": rank, "number": self.number, "text": "x" * (rank * 1000 % 3001)}

        gathered: list[Any] = [None] * group.size
        all_gather_object(gathered, of(group.rank), group)
        expect_equal(gathered, [of(rank) for rank in range(group.size)], "gathered objects")
        shared = [of(group.rank), group.rank]
        broadcast_object_list(shared, group_src=drawn.root, group=group)
        expect_equal(shared, [of(drawn.root), drawn.root], "objects of the root")
        return (lambda: None), []


def _play(seed: int, group: ProcessGroup) -> None:
    size = group.size
    groups: dict[str, ProcessGroup | None] = {"all": group}
    roots = {"all": size}
    if group.can_split:
        groups["half"] = group.split(group.rank % 2)
        groups["backwards"] = group.split(0, -group.rank)
        groups["without last"] = group.split(0 if group.rank < size - 1 or size == 1 else None)
        roots.update({"half": max(1, size // 2), "backwards": size, "without last": max(1, size - 1)})
    caller = _Caller(group, groups, roots, random.Random(f"calls {seed}"), random.Random(f"calls {seed} {group.rank}"))
    for _ in range(_CALLS):
        caller.issue()
    while caller.pending:
        caller.wait(caller.own.randrange(len(caller.pending)))
    for name, made in groups.items():
        if made is not None and name != "all":
            made.close()


CHECKS: dict[str, Check] = {f"random_calls_{seed}": partial(_play, seed) for seed in range(8)}
