"""Draws measurements: time and bus bandwidth over size, with a line for each backend."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from ...errors import MisuseError
from .results import Measurement


def require_matplotlib() -> None:
    """Check, before the measurement, that it will be possible to draw a plot.

    Raises:
        MisuseError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MisuseError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def save_plot(measurements: Sequence[Measurement], path: str) -> None:
    """Write a picture with a row for each collective and dtype. The path's suffix selects the format."""
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
