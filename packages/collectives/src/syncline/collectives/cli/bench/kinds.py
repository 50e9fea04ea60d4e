"""The collectives that can be measured: their data, their expected results, and their bandwidth factors.

Sizes and factors are defined as in nccl-tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). The size S of a
collective is the size of its input or of its output, whichever is larger. For an `all_gather`, S is the size of all parts
together. The time of one call is t.

- Algorithm bandwidth = S / t, as the program sees it.
- Bus bandwidth = S / t * factor(number of ranks), for a comparison with the bandwidth of the hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ROOT = 0
CPU = torch.device("cpu")

PERIOD = 31
"""The test data repeat after this many ranks or indices. The number is prime, so that ranks whose distance
is a power of two have different data."""

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]


def plain_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a tensor with `torch.empty`."""
    return torch.empty(numel, dtype=dtype, device=device)


class Buffers:
    """The tensors of one rank, for the measurement of a collective with one dtype and size.

    Attributes:
        block: the tensor with the data of all ranks, or the only tensor of the collective.
        part: another tensor, for this rank's share of the block. Empty if the number of ranks does not divide the block's size.
        output: a tensor of the block's size, for the output of `all_to_all` and `send_recv`.

    The argument `allocate` is the function that allocates the block.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        block_numel: int,
        dtype: torch.dtype,
        allocate: Allocate = plain_memory,
        device: torch.device = CPU,
    ) -> None:
        self.rank = rank
        self.size = size
        self.block = allocate(block_numel, dtype, device).zero_()
        self.part = torch.zeros(block_numel // size if block_numel % size == 0 else 0, dtype=dtype, device=device)
        self.output = torch.zeros_like(self.block)

    def like(self, allocate: Allocate) -> Buffers:
        """Return buffers of the same sizes. The function `allocate` allocates their block."""
        block = self.block
        return Buffers(self.rank, self.size, block.numel(), block.dtype, allocate, block.device)

    @property
    def next_rank(self) -> int:
        """The rank to which this rank sends in a ring."""
        return (self.rank + 1) % self.size

    @property
    def previous_rank(self) -> int:
        """The rank that sends to this rank in a ring."""
        return (self.rank - 1) % self.size

    def parts(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Return one view of the block for each rank."""
        return list(block.tensor_split(self.size))

    def clear(self) -> None:
        """Fill all tensors with zeros, so that repeated sums do not overflow."""
        for tensor in (self.block, self.part, self.output):
            tensor.zero_()

    def pattern(self, rank: int, numel: int) -> torch.Tensor:
        """Return the data of a rank: numbers from -15 to 15, which repeat after 31 elements.

        Each rank has the data of the previous rank, shifted by one element. The sum over any number of ranks is between -120
        and 120, and exact in every dtype that can be reduced.
        """
        return self._repeated((torch.arange(PERIOD) + rank) % PERIOD - PERIOD // 2, numel)

    def total(self, numel: int) -> torch.Tensor:
        """Return the sum of the data of all ranks (see `pattern`)."""
        ranks = torch.arange(self.size)[:, None]
        return self._repeated(((torch.arange(PERIOD) + ranks) % PERIOD - PERIOD // 2).sum(dim=0), numel)

    def _repeated(self, period: torch.Tensor, numel: int) -> torch.Tensor:
        return period.to(self.block).repeat(-(-numel // PERIOD))[:numel]


@dataclass(frozen=True)
class Kind:
    """A collective that can be measured.

    Attributes:
        name: the collective's name on the command line.
        has_parts: whether the block has one part for each rank.
        bus_factor: returns the ratio of bus bandwidth to algorithm bandwidth, for a number of ranks.
        fill: writes this rank's inputs to its buffers.
        is_right: returns whether this rank's buffers have the right result.
        least_ranks: the smallest number of ranks for this collective.
    """

    name: str
    has_parts: bool
    bus_factor: Callable[[int], float]
    fill: Callable[[Buffers], None]
    is_right: Callable[[Buffers], bool]
    least_ranks: int = 1


def _fill_block(buffers: Buffers) -> None:
    buffers.block.copy_(buffers.pattern(buffers.rank, buffers.block.numel()))


def _fill_part(buffers: Buffers) -> None:
    buffers.part.copy_(buffers.pattern(buffers.rank, buffers.part.numel()))


def _block_is_total(buffers: Buffers) -> bool:
    return torch.equal(buffers.block, buffers.total(buffers.block.numel()))


def _part_is_total(buffers: Buffers) -> bool:
    return torch.equal(buffers.part, buffers.parts(buffers.total(buffers.block.numel()))[buffers.rank])


def _block_is_roots(buffers: Buffers) -> bool:
    return torch.equal(buffers.block, buffers.pattern(ROOT, buffers.block.numel()))


def _part_is_roots(buffers: Buffers) -> bool:
    return torch.equal(buffers.part, buffers.parts(buffers.pattern(ROOT, buffers.block.numel()))[buffers.rank])


def _block_is_gathered(buffers: Buffers) -> bool:
    numel = buffers.part.numel()
    return torch.equal(buffers.block, torch.cat([buffers.pattern(rank, numel) for rank in range(buffers.size)]))


def _output_is_exchanged(buffers: Buffers) -> bool:
    sent = [buffers.parts(buffers.pattern(rank, buffers.block.numel()))[buffers.rank] for rank in range(buffers.size)]
    return torch.equal(buffers.output, torch.cat(sent))


def _output_is_previous_ranks(buffers: Buffers) -> bool:
    return torch.equal(buffers.output, buffers.pattern(buffers.previous_rank, buffers.output.numel()))


def _on_root(is_right: Callable[[Buffers], bool]) -> Callable[[Buffers], bool]:
    return lambda buffers: buffers.rank != ROOT or is_right(buffers)


def _once(size: int) -> float:  # noqa: ARG001 - every factor takes the number of ranks
    return 1.0


def _but_own_part(size: int) -> float:
    return (size - 1) / size


KINDS = {
    kind.name: kind
    for kind in (
        Kind("all_reduce", False, lambda size: 2 * (size - 1) / size, _fill_block, _block_is_total),
        Kind("reduce", False, _once, _fill_block, _on_root(_block_is_total)),
        Kind("broadcast", False, _once, _fill_block, _block_is_roots),
        Kind("all_gather", True, _but_own_part, _fill_part, _block_is_gathered),
        Kind("reduce_scatter", True, _but_own_part, _fill_block, _part_is_total),
        Kind("all_to_all", True, _but_own_part, _fill_block, _output_is_exchanged),
        Kind("gather", True, _but_own_part, _fill_part, _on_root(_block_is_gathered)),
        Kind("scatter", True, _but_own_part, _fill_block, _part_is_roots),
        Kind("send_recv", False, _once, _fill_block, _output_is_previous_ranks, least_ranks=2),
        Kind("barrier", False, lambda _: 0.0, lambda _: None, lambda _: True),
    )
}
