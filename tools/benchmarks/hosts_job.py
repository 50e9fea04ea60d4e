"""What the ranks on the emulated hosts run: see `hosts`, which starts it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from syncline.collectives import ProcessGroup
from syncline.collectives.bench.kinds import Buffers
from syncline.collectives.bench.measure import Case as CollectiveCase
from syncline.collectives.bench.measure import measure
from syncline.collectives.bench.sizes import in_words
from syncline.collectives.bench.subjects import RAW_MPI, TORCH_GLOO, Subject, connect_subject
from syncline.hooks import (
    CompressionState,
    Int8,
    OneBit,
    PowerSGDState,
    RandomK,
    TopK,
    allreduce_hook,
    batched_powerSGD_hook,
    bf16_compress_hook,
    compression_hook,
    fp16_compress_hook,
    powerSGD_hook,
)

from . import bucket_sweep, picture, session
from .cases import many_tiny, mlp, transformer
from .contenders import ALONE, NATIVE, OURS, Wrap, alone, native, ours, trainers, with_hook
from .deferral import without_overlap
from .emulated_hosts import DEVICE
from .flat_mpi import over_flat_mpi
from .report import Report
from .summary import Summary
from .timing import interleaved
from .wire import host_count, measure_sent, minimum_bytes

WIRE_REPEATS = 3
FLAT = "flat MPI"
POWER_SGD = "PowerSGD rank 1"
# Two steps before it starts: buckets are rebuilt after the first.
_power_sgd = partial(PowerSGDState, None, 1, 2)
HOOKS: dict[str, tuple[Callable[[], object], Callable[..., Any]]] = {
    "fp16": (lambda: None, fp16_compress_hook),
    "bf16": (lambda: None, bf16_compress_hook),
    "int8": (lambda: CompressionState(Int8()), compression_hook),
    "one bit": (lambda: CompressionState(OneBit()), compression_hook),
    "top 1 %": (lambda: CompressionState(TopK(0.01)), compression_hook),
    "random 1 %": (lambda: CompressionState(RandomK(0.01)), compression_hook),
    POWER_SGD: (_power_sgd, powerSGD_hook),
    "batched PowerSGD rank 1": (_power_sgd, batched_powerSGD_hook),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank of the job calls it."""
    options = session.parse(session.parser(__doc__, list(PARTS)), arguments)
    with session.groups() as group:
        report = Report("hosts", options, group)
        for part in options.parts:
            PARTS[part](options, group, report)
    return 0


def _collective(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    size_bytes = 2**12 if options.quick else 25 * 2**20
    subjects = [connect_subject(name, group) for name in (group.backend_name, RAW_MPI, TORCH_GLOO)]
    case = CollectiveCase("all_reduce", torch.float32, size_bytes)
    measured = measure(case, subjects, group, budget_s=0.1 * options.steps)
    least = minimum_bytes(size_bytes, host_count(group))
    rows, figures = [], {}
    for subject, measurement in zip(subjects, measured, strict=True):
        sent = _sent_by(subject, case, group)
        summary = Summary.of(measurement.samples_s)
        figures[subject.name] = {**asdict(summary), "sent_bytes": sent, "minimum_bytes": least}
        rows.append([subject.name, summary.in_ms(), f"{sent / 2**20:.2f}", _times(sent, least)])
        subject.close()
    title = f"all-reduce of {in_words(size_bytes)}, ms: median [quartiles]; MiB that a host sends"
    report.table("collective", title, ["subject", "time", "sent", "times minimum"], rows)
    report.keep("collective", figures)


def _sent_by(subject: Subject, case: CollectiveCase, group: ProcessGroup) -> float:
    buffers = Buffers(group.rank, group.size, case.numel(group.size), case.dtype)
    return measure_sent(subject.prepare(case.collective, buffers), WIRE_REPEATS, DEVICE, group)


def _times(sent_bytes: float, minimum: float) -> str:
    return f"{sent_bytes / minimum:.2f}" if minimum else "-"


def _hooks(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    case = mlp(16, session.scale(options))
    hooked = {name: with_hook(ours(group), _maker(make), hook) for name, (make, hook) in HOOKS.items()}
    wraps = {OURS: ours(group), FLAT: over_flat_mpi(ours(group)), **hooked, NATIVE: native(), ALONE: alone}
    steps = trainers(case, wraps)
    taken = interleaved(steps, group, options.steps)
    found = {name: Summary.of([step.total_s for step in taken[name]]) for name in taken}
    sent = {name: measure_sent(step, WIRE_REPEATS, DEVICE, group) for name, step in steps.items()}
    rows = [
        [name, summary.in_ms(), f"{found[OURS].median_s / summary.median_s:.2f}", f"{sent[name] / 2**20:.3f}"]
        for name, summary in found.items()
    ]
    title = f"{case.name}, ms: median [quartiles]; MiB that a host sends in a step"
    report.table("hooks", title, ["contender", "step", "times faster", "sent"], rows)
    figures = {name: {**asdict(summary), "sent_bytes": sent[name]} for name, summary in found.items()}
    report.keep("hooks", {"case": case.name, "steps": figures})
    picture.bars(report.picture("hooks"), f"{group.size} ranks on two hosts", {case.name: found})


def _maker(make: Callable[[], object]) -> Callable[[torch.nn.Module], object]:
    return lambda _: make()


def _buckets(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    scale = session.scale(options)
    figures = {}
    for number, case in enumerate((mlp(16, scale), transformer(2, scale), many_tiny(scale))):
        found = bucket_sweep.sweep(case, {OURS: partial(ours, group), NATIVE: native}, group, options.steps)
        bucket_sweep.show(case, found, report, "buckets", picture_name=f"buckets-{number}")
        best = min(point.median_s for point in found[OURS].values())
        report.line(f"one reduction for each parameter takes {found[OURS]['one each'].median_s / best:.2f} times the best")
        figures[case.name] = bucket_sweep.as_figures(found)
    report.keep("buckets", figures)


def _overlap(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    figures: dict[str, dict[str, Summary]] = {}
    wraps: dict[str, Wrap] = {
        OURS: ours(group),
        f"{OURS}, after backward": without_overlap(ours(group), allreduce_hook),
        NATIVE: native(),
        f"{NATIVE}, after backward": without_overlap(native(), allreduce_hook),
        ALONE: alone,
    }
    scale = session.scale(options)
    for case in (mlp(64, scale), transformer(8, scale)):
        taken = interleaved(trainers(case, wraps), group, options.steps)
        figures[case.name] = found = {name: Summary.of([step.total_s for step in steps]) for name, steps in taken.items()}
        rows = [[name, summary.in_ms()] for name, summary in found.items()]
        report.table("overlap", f"{case.name}, ms: median [quartiles]", ["contender", "step"], rows)
    report.keep(
        "overlap", {case: {name: asdict(summary) for name, summary in found.items()} for case, found in figures.items()}
    )
    picture.bars(report.picture("overlap"), f"{group.size} ranks on two hosts", figures)


PARTS: dict[str, Callable[[argparse.Namespace, ProcessGroup, Report], None]] = {
    "collective": _collective,
    "hooks": _hooks,
    "buckets": _buckets,
    "overlap": _overlap,
}

if __name__ == "__main__":
    sys.exit(main())
