"""Show a trace as tables for the terminal, with the package rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .floor import Floor
from .rendering import milliseconds, printed, table
from .summary import RankSummary, StepSummary, summarize_ranks, summarize_steps
from .timeline import Timeline

if TYPE_CHECKING:
    from rich.table import Table


def tables(timeline: Timeline, floor: Floor | None = None) -> str:
    """Return a text with three parts: the text that `in_words` returns, a table of the ranks, and a table of the steps.

    If `floor` is given, the table of the steps compares the measured times with the shortest possible times.
    """
    steps = summarize_steps(timeline)
    if not steps:
        return f"{in_words(timeline)}; no step was traced by all of them"
    return printed(in_words(timeline), _of_ranks(summarize_ranks(timeline, steps)), _of_steps(steps, floor))


def in_words(timeline: Timeline) -> str:
    """Return a text with the number of traced ranks, the missing ranks, and the error of the clocks."""
    missing = f" (missing: {', '.join(map(str, timeline.missing))})" if timeline.missing else ""
    error = timeline.error_s
    clocks = "clocks were not aligned" if error is None else f"clocks are aligned within {1e6 * error:.3g} us"
    return f"{len(timeline.ranks)} of {timeline.size} rank(s){missing}; {clocks}"


def _of_ranks(ranks: Sequence[RankSummary]) -> Table:
    columns = ("rank", "compute, ms", "exposed, ms", "was last", "late by, ms", "others waited for it, ms")
    made = table("Ranks (medians of the steps)", columns)
    for one in ranks:
        made.add_row(
            str(one.rank),
            milliseconds(one.compute_s),
            milliseconds(one.exposed_s),
            f"{one.times_last} times",
            milliseconds(one.late_s) if one.times_last else "-",
            milliseconds(one.caused_s),
        )
    return made


def _of_steps(steps: Sequence[StepSummary], floor: Floor | None) -> Table:
    columns = ("step", "took, ms", "compute, ms", "exposed, ms", "last rank", "late by, ms", "MiB", "MiB/s")
    compared = () if floor is None else ("% of the floor's",)
    made = table("Steps (means of the ranks)", (*columns, *compared))
    for step in steps:
        made.add_row(
            str(step.number),
            milliseconds(step.duration_s),
            milliseconds(step.compute_s),
            milliseconds(step.exposed_s),
            str(step.last_rank),
            milliseconds(step.late_s),
            f"{step.nbytes / 2**20:.3g}",
            f"{step.bandwidth / 2**20:.4g}",
            *(() if floor is None else (_percent(floor, step),)),
        )
    return made


def _percent(floor: Floor, step: StepSummary) -> str:
    return f"{100 * floor.share(step.bucket_bytes, step.reducing_s):.3g}" if step.reducing_s > 0 else "-"
