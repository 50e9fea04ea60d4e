"""Show a trace as a part of an HTML page, with plots by Plotly."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from .rendering import figure, script
from .summary import StepSummary, summarize_steps
from .table import in_words
from .timeline import RankTimeline, Timeline

_PHASES = {"forward": "#4c78a8", "backward": "#72b7b2", "waiting": "#e45756", "optimizer": "#b279a2", "bucket": "#eeca3b"}
_MOST_NAMES = 5


def fragment(timeline: Timeline) -> str:
    """Return HTML with the timeline of the slowest step, plots of waiting and exposed communication, and a table of buckets.

    The result contains Plotly's script and needs no other file.
    """
    steps = summarize_steps(timeline)
    words = f"<h2>Trace</h2>\n<p>{html.escape(in_words(timeline))}</p>"
    if not steps:
        return f"{words}\n<p>No step was traced by all of them.</p>"
    slowest = max(steps, key=lambda step: step.duration_s)
    figures = [
        figure(
            "trace-timeline",
            _bars(timeline, slowest.number),
            f"Step {slowest.number}, the slowest",
            {"title": "ms"},
            {"autorange": "reversed", "categoryorder": "array", "categoryarray": _rows(timeline)},
            barmode="overlay",
        ),
        figure("trace-waiting", _waiting(timeline, steps), "Waiting for communication", {"title": "step"}, {"title": "ms"}),
        figure("trace-exposed", _exposed(steps), "Exposed communication", {"title": "step"}, {"title": "% of the step"}),
    ]
    return "\n".join([words, script(), *figures, _bucket_table(timeline, slowest.number)])


def _rows(timeline: Timeline) -> list[str]:
    return [row for rank in timeline.ranks for row in (_row(rank), _bucket_row(rank))]


def _row(rank: RankTimeline) -> str:
    return f"rank {rank.header.rank}"


def _bucket_row(rank: RankTimeline) -> str:
    return f"{_row(rank)}, buckets"


def _bars(timeline: Timeline, number: int) -> list[dict[str, Any]]:
    origin = min(step.forward_started for step in timeline.of_step(number))
    slices = [one for rank in timeline.ranks for one in _slices(rank, number)]
    bars = []
    for phase, color in _PHASES.items():
        own = [one for one in slices if one[0] == phase]
        bars.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": phase,
                "marker": {"color": color, "line": {"color": "white", "width": 1}},  # separates neighbours
                "y": [row for _, row, _, _, _ in own],
                "base": [1e3 * (start - origin) for _, _, start, _, _ in own],
                "x": [1e3 * (end - start) for _, _, start, end, _ in own],
                "hovertext": [said for _, _, _, _, said in own],
                "hoverinfo": "text",
            }
        )
    return bars


def _slices(rank: RankTimeline, number: int) -> list[tuple[str, str, float, float, str]]:
    step, row = rank.steps[number], _row(rank)
    spans = [
        ("backward", step.backward_started, step.finalize_started, "backward"),
        ("waiting", step.finalize_started, step.finished, "waiting"),
        *(("optimizer", one.started, one.finished, one.name) for one in step.optimizers),
    ]
    if step.forward_ended:
        spans.insert(0, ("forward", step.forward_started, step.forward_ended, "forward"))
    found = [(phase, row, start, end, f"{row}: {said}") for phase, start, end, said in spans]
    for one in step.buckets:
        said = f"{row}: bucket {one.number}, {one.nbytes} bytes"
        found.append(("bucket", _bucket_row(rank), one.started, one.finished, said))
    return [(phase, row, start, end, f"{said}, {1e3 * (end - start):.2f} ms") for phase, row, start, end, said in found]


def _waiting(timeline: Timeline, steps: Sequence[StepSummary]) -> list[dict[str, Any]]:
    numbers = [step.number for step in steps]
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"rank {rank.header.rank}",
            "x": numbers,
            "y": [1e3 * rank.steps[number].waited_s for number in numbers],
        }
        for rank in timeline.ranks
    ]


def _exposed(steps: Sequence[StepSummary]) -> list[dict[str, Any]]:
    shares = [100 * step.exposed_s / step.duration_s for step in steps]
    return [{"type": "bar", "x": [step.number for step in steps], "y": shares}]


def _bucket_table(timeline: Timeline, number: int) -> str:
    rank = timeline.ranks[0]
    step = rank.steps[number]
    layout = rank.layouts[step.layout]
    rows = ["<tr><th>bucket</th><th>bytes</th><th>ready, ms into backward</th><th>reduced in, ms</th><th>parameters</th></tr>"]
    for one in step.buckets:
        names = layout[one.number].names if one.number < len(layout) else ()
        shown = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")
        ready, took = 1e3 * (one.ready - step.backward_started), 1e3 * (one.finished - one.started)
        cells = (str(one.number), str(one.nbytes), f"{ready:.2f}", f"{took:.2f}", html.escape(shown))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    title = f"<h3>Buckets of step {number} on rank {rank.header.rank}</h3>"
    style = "<style>#trace-buckets :is(td, th):last-child { text-align: left; }</style>"
    return f'{title}\n{style}\n<table id="trace-buckets">\n' + "\n".join(rows) + "\n</table>"
