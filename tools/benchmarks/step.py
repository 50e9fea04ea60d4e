"""Training steps side by side: our DDP, torch's DDP over Gloo, and no synchronisation at all.

    python3 tools/dev.py bench step [--parts cases] [--json PATH] [--plot FOLDER]

All train copies of one model in one process, taking turns. Every rank computes with one thread, and a step (forward, backward,
optimizer) takes as long as on its slowest rank. The parts:

cases    each model: median and quartiles of a step, ours over torch's, and the communication left exposed (a step minus an
         unsynchronised step), ours over torch's, with the geometric mean over the models
unused   the same with find_unused_parameters
buckets  steps by bucket size, from one parameter a bucket to all in one
memory   peak memory of a rank with gradient_as_bucket_view, ours and torch's
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from syncline.collectives import ProcessGroup, exchange_objects

from . import bucket_sweep, memory, picture, session
from .cases import Case, all_cases, mlp, transformer
from .contenders import ALONE, NATIVE, OURS, Wrap, alone, native, ours, trainers
from .report import Report
from .summary import Summary, as_times, exposed_ratio, geometric_mean
from .timing import interleaved

VIEWS = ", views"


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank of the job calls it."""
    options = session.parse(session.parser(__doc__, list(PARTS)), arguments)
    with session.groups() as group:
        report = Report("step", options, group)
        for part in options.parts:
            PARTS[part](options, group, report)
    return 0


def _cases(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    _compare("cases", {}, options, group, report)


def _unused(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    _compare("unused", {"find_unused_parameters": True}, options, group, report)


def _compare(part: str, arguments: dict[str, Any], options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    found: dict[str, dict[str, Summary]] = {}
    for case in all_cases(session.scale(options)):
        taken = interleaved(trainers(case, _wraps(group, **arguments)), group, options.steps)
        found[case.name] = {name: Summary.of([step.total_s for step in steps]) for name, steps in taken.items()}
        report.table(part, f"{case.name}, ms: median [quartiles]", *_table(found[case.name]))
    means = {views or "plain": geometric_mean([_exposed(case, views) for case in found.values()]) for views in ("", VIEWS)}
    report.line(
        f"\n{part}: exposed communication, ours over torch's, geometric mean over {len(found)} cases: "
        f"{as_times(means['plain'])}; with gradient_as_bucket_view {as_times(means[VIEWS])}"
    )
    report.keep(
        part,
        {
            "cases": [_figures(case, summaries) for case, summaries in found.items()],
            "exposed_ratio_geometric_mean": means["plain"],
            "exposed_ratio_geometric_mean_views": means[VIEWS],
        },
    )
    picture.bars(report.picture(part), f"training steps, {group.size} ranks", found)


def _wraps(group: ProcessGroup, **arguments: Any) -> dict[str, Wrap]:
    return {
        OURS: ours(group, **arguments),
        OURS + VIEWS: ours(group, gradient_as_bucket_view=True, **arguments),
        NATIVE: native(**arguments),
        NATIVE + VIEWS: native(gradient_as_bucket_view=True, **arguments),
        ALONE: alone,
    }


def _exposed(found: dict[str, Summary], views: str) -> float | None:
    return exposed_ratio(found[OURS + views].median_s, found[NATIVE + views].median_s, found[ALONE].median_s)


def _table(found: dict[str, Summary]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, summary in found.items():
        times = summary.median_s / found[NATIVE].median_s
        exposed_ms = 1e3 * (summary.median_s - found[ALONE].median_s)
        ratio = exposed_ratio(summary.median_s, found[NATIVE].median_s, found[ALONE].median_s)
        rows.append([name, summary.in_ms(), f"{times:.2f}", f"{exposed_ms:.2f}", as_times(ratio)])
    return ["contender", "step", "over torch", "exposed", "over torch"], rows


def _figures(case: str, found: dict[str, Summary]) -> dict[str, Any]:
    return {
        "case": case,
        "steps": {name: asdict(summary) for name, summary in found.items()},
        "step_ratio": found[OURS].median_s / found[NATIVE].median_s,
        "step_ratio_views": found[OURS + VIEWS].median_s / found[NATIVE + VIEWS].median_s,
        "exposed_ratio": _exposed(found, ""),
        "exposed_ratio_views": _exposed(found, VIEWS),
    }


def _buckets(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    case = transformer(2, session.scale(options))
    found = bucket_sweep.sweep(case, {OURS: partial(ours, group), NATIVE: native}, group, options.steps)
    bucket_sweep.show(case, found, report, "buckets")
    report.keep("buckets", {"case": case.name, "steps": bucket_sweep.as_figures(found)})


def _memory(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    if not memory.can_be_measured():
        report.line("\nmemory: not measured, for it needs Linux with glibc")
        return
    figures = {}
    scale = session.scale(options)
    for case in (mlp(16, scale), transformer(2, scale)):
        found = {name: _peak(case, wrap, group) for name, wrap in _wraps(group).items()}
        least = max(found[NATIVE + VIEWS], 1)
        rows = [[name, f"{peak / 2**20:.1f}", f"{peak / least:.2f}"] for name, peak in found.items()]
        report.table("memory", f"{case.name}, peak of a rank", ["contender", "MiB", "over torch, views"], rows)
        figures[case.name] = found
    report.keep("memory", {"peak_bytes": figures})


def _peak(case: Case, wrap: Wrap, group: ProcessGroup) -> int:
    """Of the rank that takes most; the model itself counts, as it is made within."""
    peaks: list[int] = exchange_objects(memory.peak_bytes(lambda: trainers(case, {"": wrap})[""]), group=group)
    return max(peaks)


PARTS: dict[str, Callable[[argparse.Namespace, ProcessGroup, Report], None]] = {
    "cases": _cases,
    "unused": _unused,
    "buckets": _buckets,
    "memory": _memory,
}

if __name__ == "__main__":
    sys.exit(main())
