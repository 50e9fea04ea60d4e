"""The collectives that can be measured: their data, their right answers, and what nccl-tests divides their bandwidth by.

Sizes and factors are those of nccl-tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). The size S of a
collective is that of its larger side: the whole tensor of an `all_reduce`, the parts of all ranks of an `all_gather`.

- algorithm bandwidth = S / t: what the program sees.
- bus bandwidth = S / t * factor(n ranks): what the slowest link carries when the algorithm is the best there is. It does not
  depend on the number of ranks, so it can be compared with what the hardware promises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ROOT = 0

Allocate = Callable[[int, torch.dtype], torch.Tensor]


def _plain_memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


class Buffers:
    """The tensors of one case on one rank.

    Attributes:
        block: the larger side; for collectives with one tensor that tensor.
        part: this rank's share, a `size`-th of the block; empty where the block has no parts.
        output: a second block, for `all_to_all`.

    Args:
        rank: this rank.
        size: the number of ranks.
        block_numel: elements of the block.
        dtype: of all tensors.
        allocate: where the block comes from.
    """

    def __init__(self, rank: int, size: int, block_numel: int, dtype: torch.dtype, allocate: Allocate = _plain_memory) -> None:
        self.rank = rank
        self.size = size
        self.block = allocate(block_numel, dtype).zero_()
        self.part = torch.zeros(block_numel // size if block_numel % size == 0 else 0, dtype=dtype)
        self.output = torch.zeros_like(self.block)

    def parts(self, block: torch.Tensor) -> list[torch.Tensor]:
        """A view of a block for each rank."""
        return list(block.tensor_split(self.size))

    def clear(self) -> None:
        """All zeros: the sums of sums of zeros do not overflow, however often a case is repeated."""
        for tensor in (self.block, self.part, self.output):
            tensor.zero_()

    def pattern(self, rank: int, numel: int) -> torch.Tensor:
        """Data of a rank: differs by rank and by index, and is exact, sums too, in every dtype."""
        return (torch.arange(numel) % 5 + rank + 1).to(self.block.dtype)

    def total(self, numel: int) -> torch.Tensor:
        """The sum of the patterns of all ranks."""
        size = self.size
        return (torch.arange(numel) % 5 * size + size * (size + 1) // 2).to(self.block.dtype)


@dataclass(frozen=True)
class Kind:
    """A collective as the bench sees it.

    Attributes:
        name: as in the contract.
        has_parts: whether each rank owns a part of the block.
        bus_factor: from the number of ranks to what nccl-tests multiplies algorithm bandwidth by.
        fill: put this rank's data into the buffers.
        is_right: whether the result is the expected one on this rank.
    """

    name: str
    has_parts: bool
    bus_factor: Callable[[int], float]
    fill: Callable[[Buffers], None]
    is_right: Callable[[Buffers], bool]


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
        Kind("barrier", False, lambda _: 0.0, lambda _: None, lambda _: True),
    )
}
