"""The command `predict` predicts how long a traced step would take on other numbers of ranks."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from syncline.collectives import InvalidArgumentError
from syncline.collectives.internal import AlgorithmThresholds

from ..tracing.part import PATTERN
from ..tracing.timeline import Timeline
from ..tracing.trace_file import read_timeline
from . import page
from .compression import compressions
from .cost_model import CostModel, Link
from .forecast import advice, forecast
from .network import link_in_words, network_from
from .table import tables
from .workload_of_trace import workload_of

HELP = "predict the steps of a traced training on other numbers of ranks, for bucket sizes and compression hooks"

_WITHIN = "latency_us=10,bandwidth_gbps=40"
_MOST_RANKS = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the trace, the network, and the numbers of ranks."""
    parser.add_argument("trace", type=Path, help="the folder that SYNCLINE_TRACE names")
    parser.add_argument(
        "--network",
        required=True,
        metavar="BENCH.json|latency_us=..,bandwidth_gbps=..",
        help="the network between nodes: a file of `syncline bench --json` with one rank on each node, or "
        "microseconds and Gbit/s",
    )
    parser.add_argument(
        "--backend", help="the backend in BENCH.json to use (default: the first backend that is not a baseline)"
    )
    parser.add_argument(
        "--ranks",
        default="2..1024",
        metavar="FROM..TO",
        help="numbers of ranks: FROM, TO and the powers of two between, or a list such as 2,6,12",
    )
    parser.add_argument("--per-node", type=int, default=1, metavar="N", help="ranks on each node")
    parser.add_argument(
        "--within", default=_WITHIN, metavar="latency_us=..,bandwidth_gbps=..", help="the network between the ranks of a node"
    )
    parser.add_argument(
        "--ring-bytes",
        type=int,
        default=AlgorithmThresholds.ring_bytes,
        help="nodes reduce in a ring if the tensor has at least this many bytes for each node; 0: always, as Gloo and NCCL "
        "mostly do",
    )
    parser.add_argument(
        "--speed",
        action="append",
        default=[],
        metavar="HOOK=GB_PER_S",
        help="speed of a hook (bf16, powersgd-4) in 10**9 bytes of gradients a second (default: measured on this machine)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots (needs the extra [report])")


def run(arguments: argparse.Namespace) -> int:
    """Predict the steps, and print tables and advice. With `--html`, also write the page."""
    ranks = parse_ranks(arguments.ranks)
    if arguments.per_node < 1:
        raise InvalidArgumentError(f"--per-node: expected at least 1, found {arguments.per_node}")
    if arguments.ring_bytes < 0:
        raise InvalidArgumentError(f"--ring-bytes: expected at least 0, found {arguments.ring_bytes}")
    between = network_from(arguments.network, arguments.ring_bytes, arguments.backend)
    model = CostModel(between, link_in_words(arguments.within, "--within"), arguments.per_node, arguments.ring_bytes)
    speeds = dict(_speed(text) for text in arguments.speed)
    if not any(arguments.trace.glob(PATTERN)):
        raise InvalidArgumentError(
            f"expected a folder with files {PATTERN}, found none in {arguments.trace}: trace a run of at least 2 ranks with "
            "SYNCLINE_TRACE=FOLDER, and name that folder"
        )
    timeline = read_timeline(arguments.trace)
    found = forecast(workload_of(timeline), model, ranks, compressions(speeds))
    print(tables(found, _in_words(timeline, between, arguments.per_node)))
    print(advice(found))
    if arguments.html is not None:
        page.write(found, arguments.html)
        print(f"wrote {arguments.html}")
    return 0


def _in_words(timeline: Timeline, between: Link, per_node: int) -> str:
    link = f"{1e6 * between.latency_s:.3g} us and {8e-9 * between.bandwidth:.3g} Gbit/s between nodes"
    return f"from a trace of {len(timeline.ranks)} of {timeline.size} rank(s); {link}, {per_node} rank(s) on each"


def parse_ranks(text: str) -> list[int]:
    """Return the world sizes that a text names, such as "2..1024" or "2,6,12".

    "2..1024" names 2, 1024, and all powers of two between them.

    Raises:
        InvalidArgumentError: the text has another form, or a number is below 2 or above 1,048,576.
    """
    span = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
    if span:
        first, last = int(span[1]), int(span[2])
        powers = (2**exponent for exponent in range(_MOST_RANKS.bit_length()))
        ranks = sorted({first, last, *(power for power in powers if first < power < last)}) if first <= last else []
    else:
        ranks = sorted({int(word) for word in text.split(",")}) if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text) else []
    if not ranks or ranks[0] < 2 or ranks[-1] > _MOST_RANKS:
        raise InvalidArgumentError(f"--ranks: expected 2 to {_MOST_RANKS} ranks, such as 2..1024 or 2,6,12; found {text!r}")
    return ranks


def _speed(text: str) -> tuple[str, float]:
    match = re.fullmatch(r"([\w-]+)=(\d+(?:\.\d+)?)", text)
    if match is None or float(match[2]) <= 0:
        raise InvalidArgumentError(f"--speed: expected HOOK=GB_PER_S, such as bf16=20, found {text!r}")
    return match[1], 1e9 * float(match[2])
