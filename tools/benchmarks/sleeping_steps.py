"""How much communication of sleeping layers shows in a step, and how much the network makes unavoidable."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from syncline.collectives import ProcessGroup

from . import session
from .cases import FULL
from .contenders import ALONE, NATIVE, OURS, alone, native, ours, trainers
from .report import Report
from .sleeping import LAYER_BYTES, LAYERS, sleeping_layers
from .summary import Summary
from .targets import EXPOSED_OVER_FORCED, SLEEPING_STEP
from .timing import interleaved
from .wire import minimum_bytes

# Backward divided by the time on the wire: the network is the bottleneck, or everything but the last layer can be hidden.
PACES = {"half as long as the wire": 0.5, "1.5 times as long as the wire": 1.5}
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def add_layers(parser: argparse.ArgumentParser) -> None:
    """The options for the model of the sleeping steps."""
    default_mib = LAYER_BYTES >> 20
    parser.add_argument(
        "--layers", type=session.at_least_one, default=LAYERS, metavar="N", help=f"that sleep (default: {LAYERS})"
    )
    parser.add_argument(
        "--layer-mib",
        type=session.at_least_one,
        default=default_mib,
        metavar="N",
        help=f"size of the gradients, and the bucket, of each (default: {default_mib})",
    )


def sleeping(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    """Steps of our DDP, torch's, and neither, with a bucket for each layer and one rank on each host. A collective."""
    layers, layer_bytes = options.layers, options.layer_mib << 20
    wire_s = 8 * minimum_bytes(layer_bytes, group.size) / bits_per_s(options.rate)
    buckets = {"gradient_as_bucket_view": True, "bucket_cap_mb": options.layer_mib}
    wraps = {OURS: ours(group, **buckets), NATIVE: native(**buckets), ALONE: alone}
    rows, kept = [], {}
    for pace, factor in PACES.items():
        backward_s = factor * wire_s * session.scale(options).layers / FULL.layers
        forced_s = forced_exposure_s(layers, backward_s, wire_s)
        taken = interleaved(trainers(sleeping_layers(backward_s, layers, layer_bytes), wraps), group, options.steps)
        times = {name: [step.total_s for step in steps] for name, steps in taken.items()}
        found = {name: Summary.of(seconds) for name, seconds in times.items()}
        shown = {name: Summary.of_difference(times[name], times[ALONE]) for name in (OURS, NATIVE)}
        for name, summary in found.items():
            over = [shown[name].in_ms(), f"{shown[name].median_s / forced_s:.2f}"] if name in shown else ["-", "-"]
            rows.append([pace, name, summary.in_ms(), *over])
        report.judge(SLEEPING_STEP, found[OURS].median_s / found[NATIVE].median_s, f"backward {pace}")
        report.judge(EXPOSED_OVER_FORCED, shown[OURS].median_s / forced_s, f"backward {pace}")
        kept[pace] = {
            "forced_s": forced_s,
            "steps": {name: asdict(summary) for name, summary in found.items()},
            "exposed": {name: asdict(summary) for name, summary in shown.items()},
        }
    title = f"{layers} layers of {options.layer_mib} MiB that sleep, {group.size} ranks, ms: median [quartiles]"
    report.table("sleeping", title, ["backward", "contender", "step", "exposed", "times what bandwidth forces"], rows)
    report.keep("sleeping", kept)


def forced_exposure_s(layers: int, backward_s: float, wire_s: float) -> float:
    """The least time of a step beyond its computation. A pure function.

    The layers that backward reaches first have their gradients first. From then on the wire is busy, or it waits for the last
    gradient.

    Args:
        layers: how many, each reduced alone.
        backward_s: seconds of each layer's backward.
        wire_s: seconds that each layer's gradients take on the wire.
    """
    return max(wire_s, layers * wire_s - (layers - 1) * backward_s)


def bits_per_s(rate: str) -> float:
    """A rate in tc's notation, such as "200mbit". A pure function."""
    unit = rate.lstrip("0123456789.")
    return float(rate.removesuffix(unit)) * _BITS[unit]
