"""The tables of a forecast for the terminal, by rich."""

from __future__ import annotations

import io

from ..tracing.extras import require_extra
from .forecast import AS_TRACED, MIB, Choice, Forecast

_WIDTH = 110


def tables(found: Forecast, title: str) -> str:
    """A row for each number of ranks: the traced buckets, and for each compression its best bucket size.

    Raises:
        MisuseError: rich is not installed.
    """
    require_extra("rich")
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Predicted steps, {title}", box=SIMPLE, title_justify="left")
    names = list(dict.fromkeys(choice.compression for choice in next(iter(found.steps.values()))))
    best = [f"best, {name}: MiB, ms, times" if name != "none" else "best buckets: MiB, ms, times" for name in names]
    for column in ("ranks", "as traced, ms", "exposed, ms", "efficiency", *best):
        table.add_column(column, justify="right")
    for ranks in found.steps:
        traced = found.traced(ranks)
        cells = [
            f"{1e3 * traced.step_s:.2f}",
            f"{1e3 * traced.exposed_s:.2f}",
            f"{100 * found.efficiency(ranks, AS_TRACED):.0f} %",
        ]
        table.add_row(str(ranks), *cells, *(_cell(found, ranks, found.best(ranks, name)) for name in names))
    text = io.StringIO()
    Console(file=text, width=_WIDTH).print(table)
    return text.getvalue().rstrip()


def _cell(found: Forecast, ranks: int, choice: Choice) -> str:
    size = "traced" if choice.cap_bytes is None else f"{choice.cap_bytes / MIB:g}"
    return f"{size}, {1e3 * found.steps[ranks][choice].step_s:.2f}, {found.gain(ranks, choice):.2f}"
