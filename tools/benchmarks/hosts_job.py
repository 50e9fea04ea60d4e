"""The program of the ranks on the emulated hosts; `hosts` starts it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from syncline.collectives import ProcessGroup, placement_of
from syncline.collectives.cli.bench.kinds import Buffers, plain_memory
from syncline.collectives.cli.bench.measure import Case as CollectiveCase
from syncline.collectives.cli.bench.measure import measure
from syncline.collectives.cli.bench.results import size_in_words
from syncline.collectives.cli.bench.subjects import IN_WINDOW, RAW_MPI, TORCH_GLOO, Subject, connect_subject
from syncline.hooks import (
    CompressionState,
    Int8,
    OneBit,
    PostLocalSGDState,
    PowerSGDState,
    RandomK,
    Sites,
    TopK,
    allreduce_hook,
    batched_powerSGD_hook,
    bf16_between_sites_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    compression_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
    post_localSGD_hook,
    powerSGD_hook,
)
from syncline.hooks.contract import Bucket, TensorFuture
from syncline.hooks.testing import FakeBucket

from . import bucket_sweep, picture, session
from .cases import many_tiny, mlp, transformer
from .contenders import ALONE, NATIVE, OURS, Wrap, alone, native, ours, trainers, with_hook
from .deferral import without_overlap
from .emulated_hosts import DEVICE
from .flat_mpi import over_flat_mpi
from .report import Report
from .sleeping_steps import add_layers, sleeping
from .summary import Summary
from .targets import BUCKETED, HOSTS_OVER_RAW, POWER_SGD_FASTER, SHARED_HOSTS_OVER_RAW, WIRE
from .timing import Phases, interleaved
from .tune import add_cases, tune
from .wire import host_count, measure_sent, minimum_bytes

WIRE_REPEATS = 3
FLAT = "flat MPI"
POWER_SGD = "PowerSGD rank 1"
BETWEEN_HOSTS = "bf16 between hosts"
LOCAL_SGD = "post-local SGD, between averagings"
START = 2
"""Steps before PowerSGD and local SGD begin: buckets are rebuilt after the first."""


def _power_sgd(_: Sites) -> PowerSGDState:
    return PowerSGDState(None, 1, START)


HOOKS: dict[str, tuple[Callable[[Sites], object], Callable[..., Any]]] = {
    "fp16": (lambda _: None, fp16_compress_hook),
    "bf16": (lambda _: None, bf16_compress_hook),
    BETWEEN_HOSTS: (lambda sites: sites, bf16_between_sites_hook),
    "int8": (lambda _: CompressionState(Int8()), compression_hook),
    "one bit": (lambda _: CompressionState(OneBit()), compression_hook),
    "top 1 %": (lambda _: CompressionState(TopK(0.01)), compression_hook),
    "random 1 %": (lambda _: CompressionState(RandomK(0.01)), compression_hook),
    POWER_SGD: (_power_sgd, powerSGD_hook),
    f"{POWER_SGD} on fp16": (_power_sgd, fp16_compress_wrapper(powerSGD_hook)),
    f"{POWER_SGD} on bf16": (_power_sgd, bf16_compress_wrapper(powerSGD_hook)),
    f"batched {POWER_SGD}": (_power_sgd, batched_powerSGD_hook),
    LOCAL_SGD: (lambda sites: PostLocalSGDState(None, sites.inside, START), post_localSGD_hook),
}
"""By name what makes a hook's state, given the ranks by host, and the hook."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank of the job calls it."""
    parser = session.parser(__doc__, list(PARTS))
    add_options(parser)
    return session.play_parsed("hosts", PARTS, session.parse(parser, arguments))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that the ranks share with the command that starts them."""
    add_cases(parser)
    add_layers(parser)
    parser.add_argument("--rate", default="1gbit", help="of the wires, as tc has it (default: 1gbit)")


def _collective(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    size_bytes = 2**16 if options.quick else 25 * 2**20
    in_window = group.backend_name + IN_WINDOW
    subjects = [connect_subject(name, group) for name in (in_window, group.backend_name, RAW_MPI, TORCH_GLOO)]
    case = CollectiveCase("all_reduce", torch.float32, size_bytes)
    measured = measure(case, subjects, group, budget_s=0.1 * options.steps)
    found = {subject.name: Summary.of(row.samples_s) for subject, row in zip(subjects, measured, strict=True)}
    sent = {subject.name: _sent_by(subject, case, group) for subject in subjects}
    least = minimum_bytes(size_bytes, host_count(group))
    what = f"all-reduce of {size_in_words(size_bytes)}"
    rows = [[name, summary.in_ms(), f"{sent[name] / 2**20:.2f}", _times(sent[name], least)] for name, summary in found.items()]
    head = ["subject", "time", "sent", "times minimum"]
    report.table("collective", f"{what}, ms: median [quartiles]; MiB that a host sends", head, rows)
    if least:
        report.judge(WIRE, sent[in_window] / least, in_window)
    over_raw = SHARED_HOSTS_OVER_RAW if group.size > host_count(group) else HOSTS_OVER_RAW
    report.judge(over_raw, found[in_window].median_s / found[RAW_MPI].median_s, in_window)
    figures = {name: {**asdict(summary), "sent_bytes": sent[name], "minimum_bytes": least} for name, summary in found.items()}
    report.keep("collective", figures)
    unit = picture.Unit("time [ms], median and quartiles", 1e3)
    picture.bars(report.picture("collective"), f"{group.size} ranks on two hosts", {what: found}, unit)
    for subject in subjects:
        subject.close()


def _sizes(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    subjects = [connect_subject(name, group) for name in (group.backend_name, RAW_MPI, TORCH_GLOO)]
    found: dict[str, dict[str, Summary]] = {subject.name: {} for subject in subjects}
    for size_bytes in (2**16, 2**17) if options.quick else (2**20, 4 * 2**20, 25 * 2**20, 64 * 2**20):
        case = CollectiveCase("all_reduce", torch.float32, size_bytes)
        measured = measure(case, subjects, group, budget_s=0.2 * options.steps)
        for subject, row in zip(subjects, measured, strict=True):
            found[subject.name][size_in_words(size_bytes)] = Summary.of(row.samples_s)
    peers = found[TORCH_GLOO]
    rows = [
        [name, size, summary.in_ms(), f"{summary.median_s / peers[size].median_s:.2f}"]
        for name, summaries in found.items()
        for size, summary in summaries.items()
    ]
    report.table("sizes", "all-reduce, ms: median [quartiles]", ["subject", "bytes", "time", "over torch's Gloo"], rows)
    report.keep("sizes", {name: {size: asdict(s) for size, s in summaries.items()} for name, summaries in found.items()})
    picture.lines(report.picture("sizes"), f"all-reduce, {group.size} ranks", "bytes", found)
    for subject in subjects:
        subject.close()


def _sent_by(subject: Subject, case: CollectiveCase, group: ProcessGroup) -> float:
    buffers = Buffers(group.rank, group.size, case.numel(group.size), case.dtype, subject.allocate() or plain_memory)
    call = subject.prepare(case.collective, buffers)
    call()  # the first call makes connections, which are not part of the collective
    return measure_sent(call, WIRE_REPEATS, DEVICE, group)


def _times(sent_bytes: float, minimum: float) -> str:
    return f"{sent_bytes / minimum:.2f}" if minimum else "-"


def _hooks(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    case = mlp(16, session.scale(options))
    hosts = Sites(group, str(placement_of(group).node))
    views = {"gradient_as_bucket_view": True}  # for ours and torch's: then there is the least to copy
    hooked = {name: with_hook(ours(group, **views), _maker(make, hosts), hook) for name, (make, hook) in HOOKS.items()}
    wraps = {
        OURS: ours(group, **views),
        FLAT: over_flat_mpi(ours(group, **views)),
        **hooked,
        NATIVE: native(**views),
        ALONE: alone,
    }
    steps = trainers(case, wraps)
    taken = interleaved(steps, group, options.steps)
    found = {name: Summary.of([step.total_s for step in taken[name]]) for name in taken}
    sent = {name: measure_sent(step, WIRE_REPEATS, DEVICE, group) for name, step in steps.items()}
    faster = {name: found[OURS].median_s / summary.median_s for name, summary in found.items()}
    rows = [[name, summary.in_ms(), f"{faster[name]:.2f}", f"{sent[name] / 2**20:.3f}"] for name, summary in found.items()]
    title = f"{case.name}, gradient_as_bucket_view, ms: median [quartiles]; MiB that a host sends in a step"
    report.table("hooks", title, ["contender", "step", "times faster", "sent"], rows)
    report.judge(POWER_SGD_FASTER, faster[POWER_SGD], case.name)
    figures = {name: {**asdict(summary), "sent_bytes": sent[name]} for name, summary in found.items()}
    report.keep("hooks", {"case": case.name, "steps": figures})
    picture.bars(report.picture("hooks"), f"{group.size} ranks on two hosts", {case.name: found})
    _close(hosts)


def _halves(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    size_bytes = 2**18 if options.quick else 25 * 2**20
    hosts = Sites(group, str(placement_of(group).node))
    averaging: dict[str, Callable[[Bucket], TensorFuture]] = {
        "float32": partial(allreduce_hook, None),
        "bf16": partial(bf16_compress_hook, None),
        BETWEEN_HOSTS: partial(bf16_between_sites_hook, hosts),
    }
    bucket = FakeBucket([torch.ones(size_bytes // 4)], group)
    calls: dict[str, Callable[[], Phases]] = {name: partial(_average, average, bucket) for name, average in averaging.items()}
    taken = interleaved(calls, group, options.steps)
    found = {name: Summary.of([call.total_s for call in taken[name]]) for name in taken}
    sent = {name: measure_sent(call, WIRE_REPEATS, DEVICE, group) for name, call in calls.items()}
    least = minimum_bytes(size_bytes // 2, host_count(group))
    rows = [[name, summary.in_ms(), f"{sent[name] / 2**20:.2f}", _times(sent[name], least)] for name, summary in found.items()]
    title = f"averaging {size_in_words(size_bytes)} of float32, ms: median [quartiles]; MiB that a host sends"
    report.table("halves", title, ["hook", "time", "sent", "times minimum of halves"], rows)
    if least:
        report.judge(WIRE, sent[BETWEEN_HOSTS] / least, BETWEEN_HOSTS)
    figures = {name: {**asdict(summary), "sent_bytes": sent[name], "minimum_bytes": least} for name, summary in found.items()}
    report.keep("halves", figures)
    _close(hosts)


def _average(average: Callable[[Bucket], TensorFuture], bucket: Bucket) -> Phases:
    started = time.perf_counter()
    average(bucket).wait()
    return Phases.undivided(time.perf_counter() - started)


def _close(hosts: Sites) -> None:
    for part in (hosts.inside, hosts.between):
        if part is not None:
            part.close()


def _maker(make: Callable[[Sites], object], hosts: Sites) -> Callable[[torch.nn.Module], object]:
    return lambda _: make(hosts)


def _buckets(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    scale = session.scale(options)
    figures = {}
    # Buckets save messages, not bytes. So they can save much time only for many small parameters.
    judged = many_tiny(scale)
    for number, case in enumerate((mlp(16, scale), transformer(2, scale), judged)):
        found = bucket_sweep.sweep(case, {OURS: partial(ours, group), NATIVE: native}, group, options.steps)
        bucket_sweep.show(case, found, report, "buckets", picture_name=f"buckets-{number}")
        if case is judged:
            report.judge(BUCKETED, found[OURS]["one each"].median_s / found[OURS]["25"].median_s, f"25 MiB; {case.name}")
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


PARTS: dict[str, session.Part] = {
    "collective": _collective,
    "sizes": _sizes,
    "hooks": _hooks,
    "halves": _halves,
    "buckets": _buckets,
    "overlap": _overlap,
    "sleeping": sleeping,
    "tune": tune,
}

if __name__ == "__main__":
    sys.exit(main())
