"""The evaluation of the DDP paper in small: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020.

    python3 tools/dev.py bench paper [--parts breakdown] [--json PATH] [--plot FOLDER]

tensors      (its figure 2) what a fixed sum of 16 MiB takes, all-reduced in tensors of 16 KiB to 16 MiB; ours and torch's
ready        (figure 2) when the gradients of a model are ready
breakdown    (figure 6) forward, backward, communication with and without overlap, optimizer; ours and torch's
buckets      (figures 7 and 8) steps by bucket size
no_sync      (figures 10 and 11) the mean iteration when gradients are synchronised every 1, 2, 4, 8 iterations, and the
             optimizer steps as often; and the loss on handwritten digits meanwhile, at the paper's batch sizes and rates
scaling      (figure 9) the share of a rank's speed on up to 256 ranks: predicted from a trace of these, for two networks
round_robin  (figure 12) steps with buckets reduced by the group itself, and by new ones in turn

Models are those of the step benchmark. Each part is a table, a picture, and an entry of the JSON file.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from importlib.util import find_spec

from syncline.collectives import ProcessGroup, RoundRobinGroup
from syncline.collectives.cli.bench.sizes import in_words
from syncline.hooks import allreduce_hook

from . import bucket_sweep, fixed_sum, picture, scaling, session
from .cases import Case, mlp, residual_cnn, transformer
from .contenders import ALONE, NATIVE, OURS, Wrap, alone, native, ours, trainers
from .deferral import without_overlap
from .latency_breakdown import Breakdown
from .report import Report
from .skipped_sync import EVERY, WINDOW, WindowOfSteps, losses, smoothed
from .summary import Summary
from .timing import Step, interleaved

STEPS = 12
"""By default: fewer than elsewhere, for there are many parts."""
AFTER = ", after backward"
GROUPS = (1, 2, 3)
PLAIN = "the group itself"
"""Its buckets lie in memory that ranks share; those of groups in turn do not, not even of one."""
ROUND_ROBIN_CAP_MB = 5.0
"""Small enough that there are buckets to take turns with."""
QUARTERS = (0.25, 0.5, 0.75, 1.0)
BATCHES = ((8, 0.02), (256, 0.06))
"""Images of a rank and learning rate, as in the paper."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank of the job calls it."""
    parser = session.parser(__doc__, list(PARTS))
    parser.set_defaults(steps=STEPS)
    options = session.parse(parser, arguments)
    if "no_sync" in options.parts and find_spec("sklearn") is None:
        parser.error("--parts no_sync needs scikit-learn: pip install 'syncline-ddp[examples]', or name the other parts")
    return session.play_parsed("paper", PARTS, options)


def _tensors(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    total, smallest = (2**16, 2**12) if options.quick else (2**24, 2**14)
    sizes = fixed_sum.tensor_sizes(total, smallest)
    found = fixed_sum.by_tensor_size(total, sizes, group, -(-options.steps // 3))
    shown = {name: {in_words(size): summary for size, summary in by_size.items()} for name, by_size in found.items()}
    rows = [[size, *(by_size[size].in_ms() for by_size in shown.values())] for size in map(in_words, sizes)]
    report.table("tensors", f"all-reduce of {in_words(total)} in all, ms: median [quartiles]", ["each tensor", *shown], rows)
    report.keep("tensors", bucket_sweep.as_figures(shown))
    picture.lines(report.picture("tensors"), f"all-reduce of {in_words(total)}, {group.size} ranks", "bytes of a tensor", shown)


def _ready(options: argparse.Namespace, _: ProcessGroup, report: Report) -> None:
    scale = session.scale(options)
    found = {
        case.name: fixed_sum.arrivals(case, options.steps)
        for case in (mlp(16, scale), transformer(2, scale), residual_cnn(4, scale))
    }
    rows = [
        [name, *(f"{1e3 * next(second for second, share in came if share >= part):.2f}" for part in QUARTERS)]
        for name, came in found.items()
    ]
    head = ["model", *(f"{100 * part:g} %" for part in QUARTERS)]
    report.table("ready", "ms of backward until this part of the gradients' elements is ready, medians", head, rows)
    report.keep("ready", found)
    shown = {name: [(1e3 * second, 100 * share) for second, share in came] for name, came in found.items()}
    picture.points(report.picture("ready"), "gradients that are ready", ("backward [ms]", "elements [%]"), shown)


def _scaling(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    figures = {}
    for number, case in enumerate((mlp(64, session.scale(options)), transformer(8, session.scale(options)))):
        found = scaling.efficiencies(scaling.on_networks(scaling.traced(case, group, options.steps)))
        rows = [[name, *(f"{100 * share:.0f}" for share in shares.values())] for name, shares in found.items()]
        title = f"{case.name}: predicted, % of a rank's speed by number of ranks"
        report.table("scaling", title, ["network, buckets", *map(str, scaling.RANKS)], rows)
        figures[case.name] = found
        shown = {name: [(ranks, 100 * share) for ranks, share in shares.items()] for name, shares in found.items()}
        labels = ("ranks, one on each node", "speed of each rank [% of one alone], predicted")
        picture.points(report.picture(f"scaling-{number}"), case.name, labels, shown, x_base=2)
    report.keep("scaling", figures)


def _breakdown(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    wraps: dict[str, Wrap] = {
        OURS: ours(group),
        OURS + AFTER: without_overlap(ours(group), allreduce_hook),
        NATIVE: native(),
        NATIVE + AFTER: without_overlap(native(), allreduce_hook),
        ALONE: alone,
    }
    shown, figures = {}, {}
    scale = session.scale(options)
    for case in (mlp(16, scale), transformer(2, scale), residual_cnn(4, scale)):
        taken = interleaved(trainers(case, wraps), group, options.steps)
        found = {
            name: Breakdown.of(taken[name], taken[name.removesuffix(AFTER) + AFTER], taken[ALONE])
            for name in wraps
            if name != ALONE
        }
        _show_breakdown(case, found, report)
        shown.update({f"{case.name}: {name}": parts.stacked_ms() for name, parts in found.items()})
        figures[case.name] = {name: asdict(parts) for name, parts in found.items()}
    report.keep("breakdown", figures)
    picture.stacked(report.picture("breakdown"), f"where a step goes, {group.size} ranks", "median [ms]", shown)


def _show_breakdown(case: Case, found: dict[str, Breakdown], report: Report) -> None:
    parts = [part.name for part in fields(Breakdown)]
    rows = [[name, *(getattr(found[name], part).in_ms() for part in parts)] for name in found]
    report.table("breakdown", f"{case.name}, ms: median [quartiles]", ["contender", *parts], rows)


def _buckets(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    scale = session.scale(options)
    figures = {}
    for number, case in enumerate((mlp(16, scale), transformer(2, scale))):
        found = bucket_sweep.sweep(case, {OURS: partial(ours, group), NATIVE: native}, group, options.steps)
        bucket_sweep.show(case, found, report, "buckets", picture_name=f"buckets-{number}")
        figures[case.name] = bucket_sweep.as_figures(found)
    report.keep("buckets", figures)


def _no_sync(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    report.keep("no_sync", {"time": _amortised(options, group, report), "loss": _convergence(options, group, report)})


def _amortised(options: argparse.Namespace, group: ProcessGroup, report: Report) -> dict[str, dict[str, dict[str, float]]]:
    case = mlp(16, session.scale(options))
    model, batch = case.model(), case.batch()
    wraps: dict[str, Wrap] = {OURS: ours(group), NATIVE: native(), ALONE: alone}
    steps: dict[str, Step] = {
        f"{name}/{every}": WindowOfSteps(wrap, case, copy.deepcopy(model), batch, every).step
        for every in EVERY
        for name, wrap in wraps.items()
    }
    # One round to warm up is two windows: with one synchronisation in a window, buckets are rebuilt in the second.
    taken = interleaved(steps, group, max(1, options.steps // WINDOW), warm_up=1)
    found = {
        name: {str(every): Summary.of([step.total_s for step in taken[f"{name}/{every}"]]) for every in EVERY} for name in wraps
    }
    rows = [[str(every), *(found[name][str(every)].in_ms() for name in wraps)] for every in EVERY]
    report.table("no_sync", f"{case.name}, ms of the mean iteration: median [quartiles]", ["synchronised every", *wraps], rows)
    picture.lines(report.picture("no_sync-time"), case.name, "iterations from one synchronisation to the next", found)
    return bucket_sweep.as_figures(found)


def _convergence(options: argparse.Namespace, group: ProcessGroup, report: Report) -> dict[str, dict[str, list[float]]]:
    figures = {}
    for batch_size, learning_rate in BATCHES:
        name = f"digits, batch {batch_size}, learning rate {learning_rate}"
        wrap = ours(group)
        iterations = 10 * options.steps
        found = {str(every): losses(wrap, group, iterations, every, batch_size, learning_rate) for every in EVERY}
        rows = [[every, f"{smoothed(values)[-1]:.4f}"] for every, values in found.items()]
        report.table("no_sync", f"{name}: loss after {iterations} iterations", ["synchronised every", "loss"], rows)
        curves = {f"every {every}": smoothed(values) for every, values in found.items()}
        picture.curves(report.picture(f"no_sync-loss-{batch_size}"), name, ("iteration", "loss, smoothed"), curves)
        figures[name] = found
    return figures


def _round_robin(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    groups = [_some_groups(group, count) for count in GROUPS]
    taking_turns: dict[str, ProcessGroup] = {
        f"{count} in turn": RoundRobinGroup(some) for count, some in zip(GROUPS, groups, strict=True)
    }
    wraps = {name: ours(one, bucket_cap_mb=ROUND_ROBIN_CAP_MB) for name, one in {PLAIN: group, **taking_turns}.items()}
    scale = session.scale(options)
    figures: dict[str, dict[str, Summary]] = {}
    for case in (mlp(16, scale), transformer(2, scale)):
        taken = interleaved(trainers(case, {**wraps, ALONE: alone}), group, options.steps)
        figures[case.name] = found = {name: Summary.of([step.total_s for step in steps]) for name, steps in taken.items()}
        rows = [[name, summary.in_ms()] for name, summary in found.items()]
        report.table("round_robin", f"{case.name}, ms: median [quartiles]", ["groups", "step"], rows)
    report.keep(
        "round_robin", {case: {name: asdict(summary) for name, summary in found.items()} for case, found in figures.items()}
    )
    picture.bars(report.picture("round_robin"), f"buckets by several groups in turn, {group.size} ranks", figures)
    for some in groups:
        for made in some:
            made.close()


def _some_groups(group: ProcessGroup, count: int) -> list[ProcessGroup]:
    """New groups of the same ranks. A collective."""
    made = [group.split(0, timeout_s=group.timeout_s) for _ in range(count)]
    return [part for part in made if part is not None]


PARTS: dict[str, session.Part] = {
    "tensors": _tensors,
    "ready": _ready,
    "breakdown": _breakdown,
    "buckets": _buckets,
    "no_sync": _no_sync,
    "scaling": _scaling,
    "round_robin": _round_robin,
}

if __name__ == "__main__":
    sys.exit(main())
