"""The collectives that can be measured: their data, their right answers, and what nccl-tests divides their bandwidth by.

Sizes and factors are those of nccl-tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). The size S of a
collective is that of its larger side: the whole tensor of an `all_reduce`, the parts of all ranks of an `all_gather`, what one
rank sends in `send_recv`, where each sends to the next rank and receives from the previous one.

- algorithm bandwidth = S / t: what the program sees.
- bus bandwidth = S / t * factor(n ranks): what the slowest link carries when the algorithm is the best there is. It does not
  depend on the number of ranks, so it can be compared with what the hardware promises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ROOT = 0
CPU = torch.device("cpu")

PERIOD = 31
"""Of the data, over ranks and indices: a prime, so that ranks whose number is a power of two all differ."""

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]


def plain_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What torch gives."""
    return torch.empty(numel, dtype=dtype, device=device)


class Buffers:
    """The tensors of one case on one rank.

    Attributes:
        block: the larger side; for collectives with one tensor that tensor.
        part: this rank's share, a `size`-th of the block; empty where the block has no parts.
        output: a second block, for `all_to_all` and `send_recv`.

    Args:
        rank: this rank.
        size: the number of ranks.
        block_numel: elements of the block.
        dtype: of all tensors.
        allocate: where the block comes from.
        device: of all tensors.
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
        """Others of the same shape, whose block comes from elsewhere."""
        block = self.block
        return Buffers(self.rank, self.size, block.numel(), block.dtype, allocate, block.device)

    @property
    def next_rank(self) -> int:
        """The one that this rank sends to, in a ring."""
        return (self.rank + 1) % self.size

    @property
    def previous_rank(self) -> int:
        """The one that sends to this rank."""
        return (self.rank - 1) % self.size

    def parts(self, block: torch.Tensor) -> list[torch.Tensor]:
        """A view of a block for each rank."""
        return list(block.tensor_split(self.size))

    def clear(self) -> None:
        """All zeros: the sums of sums of zeros do not overflow, however often a case is repeated."""
        for tensor in (self.block, self.part, self.output):
            tensor.zero_()

    def pattern(self, rank: int, numel: int) -> torch.Tensor:
        """Data of a rank: from -15 to 15, other at each index and rank of a period.

        Sums over ranks are exact in every dtype that can be reduced: over a whole period they are 0, over less below 128.
        """
        return self._repeated((torch.arange(PERIOD) + rank) % PERIOD - PERIOD // 2, numel)

    def total(self, numel: int) -> torch.Tensor:
        """The sum of the patterns of all ranks."""
        ranks = torch.arange(self.size)[:, None]
        return self._repeated(((torch.arange(PERIOD) + ranks) % PERIOD - PERIOD // 2).sum(dim=0), numel)

    def _repeated(self, period: torch.Tensor, numel: int) -> torch.Tensor:
        return period.to(self.block).repeat(-(-numel // PERIOD))[:numel]


@dataclass(frozen=True)
class Kind:
    """A collective as the bench sees it.

    Attributes:
        name: as in the contract.
        has_parts: whether each rank owns a part of the block.
        bus_factor: from the number of ranks to what nccl-tests multiplies algorithm bandwidth by.
        fill: put this rank's data into the buffers.
        is_right: whether the result is the expected one on this rank.
        least_ranks: with fewer there is nothing to measure.
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


def _once(size: int) -> float:  # noqa: ARG001 - a factor is asked with the number of ranks
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
