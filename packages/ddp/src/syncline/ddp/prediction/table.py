"""Show a forecast as tables for the terminal, with the package rich."""

from __future__ import annotations

from ..tracing.rendering import milliseconds, printed, table
from .forecast import AS_TRACED, MIB, Choice, Forecast


def tables(found: Forecast, title: str) -> str:
    """Return tables with a row for each number of ranks: the traced buckets, and the best buckets with each compression."""
    names = list(dict.fromkeys(choice.compression for choice in next(iter(found.steps.values()))))
    best = [f"best, {name}:\nMiB, ms, times" if name != "none" else "best buckets:\nMiB, ms, times" for name in names]
    made = table(f"Predicted steps, {title}", ("ranks", "as traced, ms", "exposed, ms", "efficiency", *best))
    for ranks in found.steps:
        traced = found.traced(ranks)
        cells = [
            milliseconds(traced.step_s),
            milliseconds(traced.exposed_s),
            f"{100 * found.efficiency(ranks, AS_TRACED):.0f} %",
        ]
        made.add_row(str(ranks), *cells, *(_cell(found, ranks, found.best(ranks, name)) for name in names))
    return printed(made)


def _cell(found: Forecast, ranks: int, choice: Choice) -> str:
    size = "traced" if choice.cap_bytes is None else f"{choice.cap_bytes / MIB:g}"
    return f"{size}, {milliseconds(found.steps[ranks][choice].step_s)}, {found.gain(ranks, choice):.2f}"
