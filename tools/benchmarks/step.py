"""Training steps side by side: our DDP, torch's DDP over Gloo, and no synchronisation at all.

    python3 tools/dev.py bench step [--parts cases] [--json PATH] [--plot FOLDER]

All train copies of one model in one process, and take turns. Every rank computes with one thread, and a step (forward,
backward, optimizer) takes as long as on its slowest rank. The parts:

memory   peak memory of a rank with gradient_as_bucket_view, ours and torch's
cases    each model: median and quartiles of a step, ours divided by torch's, and the exposed communication (a step minus an
         unsynchronised step of the same round), ours divided by torch's, with the geometric mean over the models
unused   the same with find_unused_parameters, each model with a layer that nothing reaches
buckets  steps by bucket size, from one parameter a bucket to all in one
record   steps that are recorded (`model.trace`), divided by steps that are not
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial

from syncline.collectives import ProcessGroup, exchange_objects

from . import bucket_sweep, memory, picture, recording, session
from .cases import Case, all_cases, many_tiny, mlp, transformer, with_unused
from .contenders import NATIVE, OURS, VIEWS, Wrap, native, ours, trainers, with_and_without_views
from .exposure import Compared
from .report import Report
from .summary import GeometricMean, Summary, as_times
from .targets import EXPOSED, MEMORY, RECORDING, RECORDING_BUSY, STEP, STEP_MEAN
from .timing import interleaved


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank of the job calls it."""
    return session.play("step", __doc__, PARTS, arguments)


def _cases(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    _compare("cases", all_cases(session.scale(options)), with_and_without_views(group), options.steps, group, report)


def _unused(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    wraps = with_and_without_views(group, find_unused_parameters=True)
    _compare("unused", map(with_unused, all_cases(session.scale(options))), wraps, options.steps, group, report)


def _compare(
    part: str, cases: Iterable[Case], wraps: dict[str, Wrap], rounds: int, group: ProcessGroup, report: Report
) -> None:
    found: dict[str, Compared] = {}
    for case in cases:
        taken = interleaved(trainers(case, wraps), group, rounds)
        found[case.name] = Compared.of({name: [step.total_s for step in steps] for name, steps in taken.items()})
        report.table(part, f"{case.name}, ms: median [quartiles]", *_table(found[case.name]))
    means = {}
    for name in (OURS, OURS + VIEWS):
        report.judge_worst(STEP, [(compared.step_ratio(name), f"{name}; {case}") for case, compared in found.items()])
        steps = GeometricMean.of({case: compared.step_ratio(name) for case, compared in found.items()})
        report.judge(STEP_MEAN, steps.value, f"{name}; {steps.basis()}")
        means[name] = GeometricMean.of({case: compared.exposed_ratio(name) for case, compared in found.items()})
        report.judge(EXPOSED, means[name].value, f"{name}; {means[name].basis()}")
    figures = {case: compared.figures() for case, compared in found.items()}
    report.keep(part, {"cases": figures, "exposed_ratio": {name: asdict(mean) for name, mean in means.items()}})
    picture.bars(report.picture(part), f"training steps, {group.size} ranks", {case: c.steps for case, c in found.items()})


def _table(compared: Compared) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, step in compared.steps.items():
        ratios = f"{compared.step_ratio(name):.2f}", as_times(compared.exposed_ratio(name))
        rows.append([name, step.in_ms(), ratios[0], compared.exposed[name].in_ms(), ratios[1]])
    return ["contender", "step", "over torch", "exposed", "over torch"], rows


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
        found = {name: _peak(case, wrap, group) for name, wrap in with_and_without_views(group).items()}
        least = max(found[NATIVE + VIEWS], 1)
        rows = [[name, f"{peak / 2**20:.1f}", f"{peak / least:.2f}"] for name, peak in found.items()]
        report.table("memory", f"{case.name}, peak of a rank", ["contender", "MiB", "over torch, views"], rows)
        report.judge(MEMORY, found[OURS + VIEWS] / least, case.name)
        figures[case.name] = found
    report.keep("memory", {"peak_bytes": figures})


def _peak(case: Case, wrap: Wrap, group: ProcessGroup) -> int:
    """Peak of the rank that takes most; the model counts, because it is made inside."""
    peaks: list[int] = exchange_objects(memory.peak_bytes(lambda: trainers(case, {"": wrap})[""]), group=group)
    return max(peaks)


def _record(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    scale = session.scale(options)
    found = {
        case.name: recording.measure(case, group, options.steps)
        for case in (mlp(16, scale), transformer(2, scale), many_tiny(scale))
    }
    rows = [
        [case, name, Summary.of(one.steps_s[name]).in_ms(), one.over_plain(name).as_ratio()]
        for case, one in found.items()
        for name in one.steps_s
    ]
    head = ["model", "step", "ms", "over not recorded"]
    report.table("record", "median [quartiles]; ratios of the same round, +- how far the median may be off", head, rows)
    rows = [
        [
            case,
            str(one.buckets),
            str(one.added.calls),
            f"{one.added.busy_s.in_us()} +- {1e6 * one.added.busy_s.margin_s:.1f}",
            f"{1e6 * one.added.write_s:.1f}",
            f"{100 * one.share:.2f}",
        ]
        for case, one in found.items()
    ]
    head = ["model", "buckets", "calls", "while it runs, us", "to write it, us", "% of the step"]
    report.table("record", "processor's time that recording adds to a step of so many buckets, alone on one rank", head, rows)
    report.judge_worst(RECORDING, [(one.over_plain(recording.RECORDED).median_s, case) for case, one in found.items()])
    report.judge_worst(RECORDING_BUSY, [(100 * one.share, case) for case, one in found.items()])
    kept = {case: {"steps": one.steps_s, "buckets": one.buckets, "added": asdict(one.added)} for case, one in found.items()}
    report.keep("record", kept)


PARTS: dict[str, session.Part] = {
    "memory": _memory,  # first, because memory that other parts leave in the process would count
    "cases": _cases,
    "unused": _unused,
    "buckets": _buckets,
    "record": _record,
}

if __name__ == "__main__":
    sys.exit(main())
