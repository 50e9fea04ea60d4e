"""Formulas for the growth of a rank's messages with the number of ranks, and fits to counts. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch


class Job(NamedTuple):
    """A job's numbers of ranks: in all, and on each host."""

    ranks: int
    per_host: int = 1

    @property
    def rounds(self) -> int:
        """Rounds of a recursive doubling, a dissemination or a binomial tree."""
        return math.ceil(math.log2(self.ranks))


class Formula(NamedTuple):
    """The expected count of one phase.

    Attributes:
        text: as in docs/reference/scaling.md; N ranks, L of them on each host.
        value: the same as a function. For messages it holds if N is a power of two: otherwise MPI's algorithms differ.
    """

    text: str
    value: Callable[[Job], int]


_LOG = Formula("log2 N", lambda job: job.rounds)
_PER_PEER = Formula("N - 1", lambda job: job.ranks - 1)

#: By library, phase and counter. If a library alone decides, there is no formula.
FORMULAS: dict[tuple[str, str, str], Formula] = {
    ("gloo", "start-up", "connections"): _PER_PEER,
    ("gloo", "start-up", "requests"): Formula("2 N + L + 14", lambda job: 2 * job.ranks + job.per_host + 14),
    ("gloo", "new_group", "connections"): _PER_PEER,
    ("gloo", "new_group", "requests"): Formula("2 N + L + 8", lambda job: 2 * job.ranks + job.per_host + 8),
    ("gloo", "comparison of calls", "messages"): Formula("3 log2 N", lambda job: 3 * job.rounds),
    ("mpi", "start of MPI", "connections"): Formula("2 log2 N - 1", lambda job: 2 * job.rounds - 1),
    ("mpi", "new_group", "connections"): Formula("0", lambda _: 0),
    ("mpi", "handshake", "messages"): _LOG,
    ("mpi", "allocate", "messages"): Formula(
        "2 log2 N + 6 log2 L, or 0 for L = 1",
        lambda job: 2 * job.rounds + 6 * Job(job.per_host).rounds if job.per_host > 1 else 0,
    ),
    ("mpi", "comparison of calls", "messages"): _LOG,
    ("mpi", "step", "messages"): Formula("3 log2 N", lambda job: 3 * job.rounds),
}

Points = Sequence[tuple[int, float]]
"""A number of ranks, and what was counted there."""

_TERMS: Mapping[str, Callable[[float], float]] = {
    "": lambda _: 1.0,
    "log2 N": math.log2,
    "N": lambda ranks: ranks,
    "N^2": lambda ranks: ranks**2,
}
_LAWS = (("",), ("", "log2 N"), ("", "N"), ("", "N", "N^2"))
_TOLERANCE = 0.04


class Fit(NamedTuple):
    """A sum of terms.

    Attributes:
        terms: such as "N".
        factors: one for each.
    """

    terms: tuple[str, ...]
    factors: tuple[float, ...]

    def at(self, ranks: int) -> float:
        """The value for this number of ranks."""
        return sum(factor * _TERMS[term](ranks) for term, factor in zip(self.terms, self.factors, strict=True))

    def __str__(self) -> str:
        return " + ".join(f"{factor:.3g} {term}".rstrip() for term, factor in zip(self.terms, self.factors, strict=True))


def fit(points: Points) -> Fit:
    """The slowest law that explains the counts: a constant, log2 N, N, or N^2 with N.

    A law with as many terms as points explains everything, so it is not tried. A law explains the counts if it misses none by
    more than 4 % of the largest count. If no law does, the result is the law whose worst miss is the smallest.
    """
    largest = max(abs(counted) for _, counted in points)
    fits = [least_squares(points, terms) for terms in _LAWS if len(terms) < max(2, len(points))]
    misses = [max(abs(found.at(ranks) - counted) for ranks, counted in points) for found in fits]
    explains = [found for found, miss in zip(fits, misses, strict=True) if miss <= _TOLERANCE * largest]
    return explains[0] if explains else fits[misses.index(min(misses))]


def least_squares(points: Points, terms: tuple[str, ...]) -> Fit:
    """The sum of these terms that comes closest to the counts."""
    matrix = torch.tensor([[_TERMS[term](ranks) for term in terms] for ranks, _ in points], dtype=torch.float64)
    counted = torch.tensor([[value] for _, value in points], dtype=torch.float64)
    return Fit(terms, tuple(torch.linalg.lstsq(matrix, counted, driver="gelsd").solution.flatten().tolist()))
