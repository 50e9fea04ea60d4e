"""Measurements, and functions that show them as a table or as JSON. The functions are pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from .kinds import KINDS
from .sizes import in_words


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the 25th percentile, the median and the 75th percentile. There must be at least one sample."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, median, third


@dataclass(frozen=True)
class Measurement:
    """One collective of one size on one backend.

    Attributes:
        collective, dtype: the collective, and the dtype of its tensors.
        size_bytes: the size S, see `kinds`.
        world_size: the number of ranks.
        backend: the name of the backend, or of the program to compare with, such as `raw-mpi`.
        samples_s: the samples. A sample is the time of one call on the slowest rank. Empty if the backend refused the case.
        note: why the backend refused, or empty.
    """

    collective: str
    dtype: str
    size_bytes: int
    world_size: int
    backend: str
    samples_s: tuple[float, ...] = ()
    note: str = ""

    @property
    def quartiles_s(self) -> tuple[float, float, float]:
        """The 25th percentile, the median and the 75th percentile, in seconds."""
        return quartiles(self.samples_s)

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second, at the median time."""
        return self.size_bytes / self.quartiles_s[1]

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that the slowest link carries, at the median time."""
        return self.algorithm_bandwidth * KINDS[self.collective].bus_factor(self.world_size)


_HEAD = ("bytes", "backend", "median us", "least", "p25", "p75", "alg GB/s", "bus GB/s", "times first")


def in_text(measurements: Sequence[Measurement]) -> str:
    """Return a table for each collective and dtype. The last column is the median divided by the first backend's median."""
    tables = []
    for (collective, dtype), rows in groupby(measurements, key=lambda row: (row.collective, row.dtype)):
        tables.append(f"{collective}, {dtype}\n{aligned([_HEAD, *_rows(list(rows))])}")
    return "\n\n".join(tables)


def in_json(measurements: Sequence[Measurement], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return all figures, in seconds and bytes per second, with a description of the machine."""
    return {"environment": dict(environment), "measurements": [_as_dict(row) for row in measurements]}


def _rows(measurements: list[Measurement]) -> list[tuple[str, ...]]:
    rows = []
    for _, same_size in groupby(measurements, key=lambda row: row.size_bytes):
        group = list(same_size)
        first = next((row for row in group if row.samples_s), None)
        rows += [_row(row, first) for row in group]
    return rows


def _row(row: Measurement, first: Measurement | None) -> tuple[str, ...]:
    if not row.samples_s or first is None:
        return (in_words(row.size_bytes), row.backend, "-", "-", "-", "-", "-", "-", "-")
    low, median, high = row.quartiles_s
    return (
        in_words(row.size_bytes),
        row.backend,
        *(f"{seconds * 1e6:.1f}" for seconds in (median, min(row.samples_s), low, high)),
        *(f"{bandwidth / 1e9:.2f}" for bandwidth in (row.algorithm_bandwidth, row.bus_bandwidth)),
        f"{median / first.quartiles_s[1]:.2f}",
    )


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Format rows of the same length as lines. Each column is as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _as_dict(row: Measurement) -> dict[str, Any]:
    known = {"collective": row.collective, "dtype": row.dtype, "size_bytes": row.size_bytes, "backend": row.backend}
    if not row.samples_s:
        return {**known, "refused": row.note}
    low, median, high = row.quartiles_s
    return {
        **known,
        "samples": len(row.samples_s),
        "least_s": min(row.samples_s),
        "median_s": median,
        "p25_s": low,
        "p75_s": high,
        "algorithm_bandwidth": row.algorithm_bandwidth,
        "bus_bandwidth": row.bus_bandwidth,
    }
