"""Measurements, and their forms as table, JSON and plot."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from ...errors import InvalidArgumentError, MisuseError
from .kinds import KINDS


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the 25th percentile, the median and the 75th percentile of one or more samples."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, median, third


@dataclass(frozen=True)
class Measurement:
    """The times of one collective of one dtype and size on one backend.

    Attributes:
        size_bytes: the size S in bytes, as `kinds` defines it.
        world_size: the number of ranks.
        backend: the name of the backend, or of the baseline, such as `raw-mpi`.
        samples_s: times of one call on the slowest rank. Empty if the backend cannot run this collective.
        note: the reason why the backend cannot run this collective; empty if it can.
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
        """The size S divided by the median time, in bytes per second."""
        return self.size_bytes / self.quartiles_s[1]

    @property
    def bus_bandwidth(self) -> float:
        """The bus bandwidth at the median time, in bytes per second, as `kinds` defines it."""
        return self.algorithm_bandwidth * KINDS[self.collective].bus_factor(self.world_size)


_HEAD = ("bytes", "backend", "median us", "least", "p25", "p75", "alg GB/s", "bus GB/s", "times first")


def in_text(measurements: Sequence[Measurement]) -> str:
    """Return a table for each collective and dtype. The last column is the ratio to the first backend's median."""
    tables = []
    for (collective, dtype), rows in groupby(measurements, key=lambda row: (row.collective, row.dtype)):
        tables.append(f"{collective}, {dtype}\n{aligned([_HEAD, *_rows(list(rows))])}")
    return "\n\n".join(tables)


def in_json(measurements: Sequence[Measurement], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return all results, in seconds and bytes per second, with a description of the machine."""
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
        return (size_in_words(row.size_bytes), row.backend, "-", "-", "-", "-", "-", "-", "-")
    low, median, high = row.quartiles_s
    return (
        size_in_words(row.size_bytes),
        row.backend,
        *(f"{seconds * 1e6:.1f}" for seconds in (median, min(row.samples_s), low, high)),
        *(f"{bandwidth / 1e9:.2f}" for bandwidth in (row.algorithm_bandwidth, row.bus_bandwidth)),
        f"{median / first.quartiles_s[1]:.2f}",
    )


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Format rows as lines of text with aligned columns. All rows have the same number of cells."""
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


# ---- sizes ----


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_size(text: str) -> int:
    """Convert a size such as "64M" or "64MiB" to bytes. K, M and G are powers of 1024.

    Raises:
        InvalidArgumentError: the text does not have this form, or the size is zero.
    """
    found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), flags=re.IGNORECASE)
    if found is None or int(found[1]) == 0:
        raise InvalidArgumentError(f"expected a size such as 4, 64K, 25M or 1G, found {text!r}")
    return int(found[1]) * _UNITS[found[2].upper()]


def ladder(smallest: int, largest: int, factor: int) -> list[int]:
    """Return the sizes from `smallest` to `largest`. Each size is `factor` times the previous size, except the last.

    Raises:
        InvalidArgumentError: `largest` is below `smallest`, or `factor` is below 2.
    """
    if largest < smallest or factor < 2:
        raise InvalidArgumentError(
            f"expected a smallest and a largest size and a factor of 2 or above, found {smallest}, {largest} and {factor}"
        )
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= factor
    return [*sizes, largest]


def size_in_words(size: int) -> str:
    """Format a number of bytes as text that `parse_size` can read: "64M" for 64 MiB, "12" for 12 bytes."""
    for unit in ("G", "M", "K"):
        if size >= _UNITS[unit] and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


# ---- plots ----


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        MisuseError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MisuseError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def check_suffix(path: Path) -> None:
    """Check that `save_plot` can write a file with this suffix.

    Raises:
        InvalidArgumentError: matplotlib does not know the suffix.
    """
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    # Without a suffix, matplotlib would write a file of another name.
    if path.suffix[1:].lower() not in known:
        found = path.suffix or "none"
        raise InvalidArgumentError(f"cannot write {path}: expected one of the suffixes {', '.join(known)}, found {found}")


def save_plot(measurements: Sequence[Measurement], path: str) -> None:
    """Plot time and bandwidth for each collective and dtype, and write the picture. The path's suffix selects the format."""
    from matplotlib.figure import Figure

    shown = [row for row in measurements if row.samples_s and row.size_bytes]
    tables = {key: list(rows) for key, rows in groupby(shown, key=lambda row: (row.collective, row.dtype))}
    figure = Figure(figsize=(11, 3.6 * max(1, len(tables))), layout="constrained")
    axes = figure.subplots(max(1, len(tables)), 2, squeeze=False)
    for (time_axis, bandwidth_axis), ((collective, dtype), rows) in zip(axes, tables.items(), strict=False):
        for backend in dict.fromkeys(row.backend for row in rows):
            _draw(time_axis, bandwidth_axis, backend, [row for row in rows if row.backend == backend])
        _label(time_axis, f"{collective}, {dtype}, {rows[0].world_size} ranks", "time [μs], median and quartiles")
        _label(bandwidth_axis, "bus bandwidth as nccl-tests define it", "[GB/s]")
    figure.savefig(path, dpi=120)


def _draw(time_axis: Any, bandwidth_axis: Any, backend: str, rows: list[Measurement]) -> None:
    sizes = [row.size_bytes for row in rows]
    low, median, high = ([row.quartiles_s[which] * 1e6 for row in rows] for which in range(3))
    time_axis.fill_between(sizes, low, high, alpha=0.2)
    time_axis.plot(sizes, median, marker=".", label=backend)
    bandwidth_axis.plot(sizes, [row.bus_bandwidth / 1e9 for row in rows], marker=".", label=backend)


def _label(axis: Any, title: str, unit: str) -> None:
    axis.set_title(title)
    axis.set_xlabel("size [bytes]")
    axis.set_ylabel(unit)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
    axis.legend()
