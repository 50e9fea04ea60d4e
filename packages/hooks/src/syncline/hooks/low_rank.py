"""Decide from a gradient's shape whether to send a low-rank approximation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.collectives import InvalidArgumentError


@dataclass(frozen=True)
class MatrixPlan:
    """How a gradient is sent: as two factors of shapes [rows, rank] and [columns, rank], or as a whole if `rank` is 0."""

    rows: int
    columns: int
    rank: int

    @property
    def is_compressed(self) -> bool:
        """Whether the gradient is sent as two factors."""
        return self.rank > 0

    @property
    def numel_sent(self) -> int:
        """The number of elements that are sent."""
        return (self.rows + self.columns) * self.rank if self.is_compressed else self.rows * self.columns


def plan_matrix(shape: Sequence[int], rank: int, min_compression_rate: float) -> MatrixPlan:
    """Decide in which form one gradient is sent, by the rule in torch's documentation.

    The first dimension becomes the rows, and all other dimensions together the columns. The gradient is compressed if `(rows +
    columns) * r * min_compression_rate < rows * columns`, where r is the smallest of `rank`, rows and columns.
    """
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    limited = min(rows, columns, rank)
    is_worth_it = (rows + columns) * limited * min_compression_rate < rows * columns
    return MatrixPlan(rows, columns, limited if is_worth_it else 0)


def compression_ratio(shapes: Sequence[Sequence[int]], rank: int, min_compression_rate: float = 2) -> float:
    """Return the factor by which PowerSGD reduces the number of elements that a rank sends for these gradients.

    A factor of 8 means that 1/8 of the elements is sent. PowerSGD sends a gradient as a whole if compression does not make it
    smaller by more than the factor `min_compression_rate`.

    Args:
        shapes: the shapes of the gradients.
        rank: the `matrix_approximation_rank` of the `PowerSGDState`.
        min_compression_rate: the `min_compression_rate` of the `PowerSGDState`.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", 2019,
    appendix F, where `min_compression_rate` is 1.

    Raises:
        InvalidArgumentError: the gradients have no elements.
    """
    plans = [plan_matrix(shape, rank, min_compression_rate) for shape in shapes]
    sent = sum(plan.numel_sent for plan in plans)
    if sent == 0:
        raise InvalidArgumentError(f"compression_ratio: expected shapes with at least one element, found {list(shapes)}")
    return sum(plan.rows * plan.columns for plan in plans) / sent
