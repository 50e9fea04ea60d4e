"""The tables of a trace for the terminal, by rich."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .extras import require_extra
from .summary import RankSummary, StepSummary, summarize_ranks, summarize_steps
from .timeline import Timeline

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 110


def tables(timeline: Timeline) -> str:
    """A table of the ranks, one of the steps, and what must be known to read them.

    Raises:
        MisuseError: rich is not installed.
    """
    require_extra("rich")
    from rich.console import Console

    steps = summarize_steps(timeline)
    if not steps:
        return f"{in_words(timeline)}; no step was traced by all of them"
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH)
    console.print(in_words(timeline), highlight=False, markup=False)
    console.print(_of_ranks(summarize_ranks(timeline, steps)))
    console.print(_of_steps(steps))
    return text.getvalue().rstrip()


def in_words(timeline: Timeline) -> str:
    """Who traced, and how well the clocks are aligned."""
    missing = f" (missing: {', '.join(map(str, timeline.missing))})" if timeline.missing else ""
    error = timeline.error_s
    clocks = "clocks were not aligned" if error is None else f"clocks are aligned within {1e6 * error:.3g} us"
    return f"{len(timeline.ranks)} of {timeline.size} rank(s){missing}; {clocks}"


def _of_ranks(ranks: Sequence[RankSummary]) -> Table:
    columns = ("rank", "compute, ms", "exposed, ms", "was last", "late by, ms", "others waited for it, ms")
    table = _table("Ranks (medians of the steps)", columns)
    for one in ranks:
        table.add_row(
            str(one.rank),
            _ms(one.compute_s),
            _ms(one.exposed_s),
            f"{one.times_last} times",
            _ms(one.late_s) if one.times_last else "-",
            _ms(one.caused_s),
        )
    return table


def _of_steps(steps: Sequence[StepSummary]) -> Table:
    columns = ("step", "took, ms", "compute, ms", "exposed, ms", "last rank", "late by, ms", "MiB", "MiB/s")
    table = _table("Steps (means of the ranks)", columns)
    for step in steps:
        table.add_row(
            str(step.number),
            _ms(step.duration_s),
            _ms(step.compute_s),
            _ms(step.exposed_s),
            str(step.last_rank),
            _ms(step.late_s),
            f"{step.nbytes / 2**20:.3g}",
            f"{step.bandwidth / 2**20:.4g}",
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, box=SIMPLE, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
