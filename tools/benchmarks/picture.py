"""Pictures of figures: bars with their spread, lines over sizes, stacked phases, curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

from .summary import Summary


class Unit(NamedTuple):
    """The label of an axis, and its units in a second."""

    label: str
    per_second: float


STEP_MS = Unit("step [ms], median and quartiles", 1e3)
US_PER_PARAMETER = Unit("for each parameter [us], median and quartiles", 1e6)


def bars(path: Path | None, title: str, groups: Mapping[str, Mapping[str, Summary]], unit: Unit = STEP_MS) -> None:
    """For each group a bar for each contender: the median, whiskers at the quartiles."""
    with _axes(path, title, height=1.5 + 0.14 * sum(len(group) + 1 for group in groups.values())) as axes:
        if axes is None:
            return
        names = list(dict.fromkeys(name for group in groups.values() for name in group))
        for number, name in enumerate(names):
            rows = [row for row, group in enumerate(groups.values()) if name in group]
            found = [group[name] for group in groups.values() if name in group]
            places = [row + 0.8 * (number + 0.5) / len(names) - 0.4 for row in rows]
            low, median, high = _quartiles(found, unit)
            spread = [list(map(sub, median, low)), list(map(sub, high, median))]
            axes.barh(places, median, height=0.8 / len(names), xerr=spread, label=name)
        axes.set_yticks(range(len(groups)), list(groups))
        axes.invert_yaxis()
        axes.set_xlabel(unit.label)
        axes.legend()


def lines(path: Path | None, title: str, x_label: str, series: Mapping[str, Mapping[str, Summary]]) -> None:
    """A line for each contender over labelled places, with a band between the quartiles."""
    with _axes(path, title) as axes:
        if axes is None:
            return
        for name, points in series.items():
            low, median, high = _quartiles(list(points.values()), STEP_MS)
            axes.fill_between(range(len(points)), low, high, alpha=0.2)
            axes.plot(range(len(points)), median, marker=".", label=name)
            axes.set_xticks(range(len(points)), list(points))
        axes.set_xlabel(x_label)
        axes.set_ylabel(STEP_MS.label)
        axes.set_ylim(bottom=0)
        axes.legend()


def stacked(path: Path | None, title: str, unit: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    """A bar for each row, made of its parts one after the other."""
    with _axes(path, title, height=1.5 + 0.35 * len(rows)) as axes:
        if axes is None:
            return
        ends = [0.0] * len(rows)
        for part in dict.fromkeys(part for row in rows.values() for part in row):
            widths = [row.get(part, 0.0) for row in rows.values()]
            axes.barh(list(rows), widths, left=ends, label=part)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.legend()


def curves(path: Path | None, title: str, labels: tuple[str, str], series: Mapping[str, Sequence[float]]) -> None:
    """A line for each name over its index."""
    with _axes(path, title) as axes:
        if axes is None:
            return
        for name, values in series.items():
            axes.plot(range(1, len(values) + 1), values, label=name)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.legend()


def points(
    path: Path | None,
    title: str,
    labels: tuple[str, str],
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_base: int | None = None,
) -> None:
    """A line for each name through its points; over a logarithmic axis where there is a base."""
    with _axes(path, title) as axes:
        if axes is None:
            return
        for name, found in series.items():
            axes.plot([x for x, _ in found], [y for _, y in found], marker=".", label=name)
        if x_base is not None:
            axes.set_xscale("log", base=x_base)
            axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.set_ylim(bottom=0)
        axes.legend()


@contextmanager
def _axes(path: Path | None, title: str, height: float = 4.5) -> Iterator[Any]:
    """Axes that are written to `path` at the end; None without a path."""
    if path is None:
        yield None
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.3)
    yield axes
    figure.savefig(path)


def _quartiles(summaries: Sequence[Summary], unit: Unit) -> tuple[list[float], list[float], list[float]]:
    low = [unit.per_second * found.p25_s for found in summaries]
    median = [unit.per_second * found.median_s for found in summaries]
    high = [unit.per_second * found.p75_s for found in summaries]
    return low, median, high
