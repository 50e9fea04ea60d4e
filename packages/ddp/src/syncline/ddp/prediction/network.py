"""Read latency and bandwidth from a text, or fit them to measurements of `syncline bench --json`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.collectives import InvalidArgumentError

from .cost_model import Link, messages, volume

LEAST_BYTES = 16 << 10
"""The fit leaves out smaller tensors, which libraries reduce in other ways."""

_BASELINES = ("floor", "raw-mpi", "torch-gloo")
_WORDS = re.compile(r"\s*latency_us\s*=\s*([\d.eE+-]+)\s*,\s*bandwidth_gbps\s*=\s*([\d.eE+-]+)\s*")


@dataclass(frozen=True)
class AllReduceTime:
    """One measured all-reduce: the size of its tensor in bytes, and its duration."""

    nbytes: float
    seconds: float


def network_from(text: str, ring_bytes: float, backend: str | None = None) -> Link:
    """Return the link that the text of `--network` describes.

    Args:
        text: a link, such as "latency_us=50,bandwidth_gbps=10" (microseconds, and 10**9 bits a second), or the path of a file
            of `bench --json`.
        ring_bytes: see `CostModel`. The fit assumes that the all-reduces in the file used this value.
        backend: the name of a backend in the file. None: the first backend that is not a baseline (`floor`, `raw-mpi` or
            `torch-gloo`).

    Raises:
        InvalidArgumentError: the text is neither a link nor a path, or no link can be fitted to the file. Or `backend` is
            given, but no file.
    """
    if "=" in text:
        if backend is not None:
            raise InvalidArgumentError(
                f"--backend: expected a file for --network, found {text!r}; leave --backend {backend} out"
            )
        return link_in_words(text, "--network")
    path = Path(text)
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"--network: expected a file of `syncline bench --json`, or latency_us=50,bandwidth_gbps=10; {text!r} is neither "
            f"({type(error).__name__}: {error})"
        ) from error
    return link_of_figures(figures, text, ring_bytes, backend)


def link_in_words(text: str, option: str) -> Link:
    """Return the link of a text such as "latency_us=50,bandwidth_gbps=10", which the command line's `option` has.

    Raises:
        InvalidArgumentError: the text has another form. The error's text contains `option`.
    """
    match = _WORDS.fullmatch(text)
    try:
        latency_us, bandwidth_gbps = (float(number) for number in match.groups()) if match else (-1.0, -1.0)
    # Texts such as "1e" or "--" match the pattern, but are no numbers.
    except ValueError:
        latency_us, bandwidth_gbps = -1.0, -1.0
    if not (0 <= latency_us < math.inf and 0 < bandwidth_gbps < math.inf):
        raise InvalidArgumentError(
            f"{option}: expected microseconds of at least 0 and Gbit/s above 0, such as latency_us=50,bandwidth_gbps=10, "
            f"found {text!r}"
        )
    return Link(1e-6 * latency_us, 1e9 / 8 * bandwidth_gbps)


def link_of_figures(figures: Any, name: str, ring_bytes: float, backend: str | None = None) -> Link:
    """Return the link that fits measurements of `syncline bench --json` best. The run must have one rank on each node.

    Raises:
        InvalidArgumentError: the file `name` has no measurements of this kind, or too few.
    """
    try:
        nodes, size = int(figures["environment"]["nodes"]), int(figures["environment"]["world_size"])
        times: dict[str, list[AllReduceTime]] = {}
        for row in figures["measurements"]:
            if row["collective"] == "all_reduce" and "median_s" in row:
                of_backend = times.setdefault(str(row["backend"]), [])
                if row["dtype"] == "float32" and int(row["size_bytes"]) >= LEAST_BYTES:
                    of_backend.append(AllReduceTime(float(row["size_bytes"]), float(row["median_s"])))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} is no file of `syncline bench --json`: {type(error).__name__}: {error}") from error
    if size < 2 or nodes != size:
        raise InvalidArgumentError(
            f"--network: expected measurements with one rank on each of at least 2 nodes, found in {name} {size} rank(s) on "
            f"{nodes} node(s): measure so, or say latency_us=..,bandwidth_gbps=.."
        )
    return fit(times[_choose(list(times), backend, name)], nodes, ring_bytes, name)


def _choose(backends: Sequence[str], wanted: str | None, name: str) -> str:
    if wanted is not None and wanted not in backends:
        raise InvalidArgumentError(f"--backend: expected one of those in {name}, {', '.join(backends)}; found {wanted!r}")
    own = [one for one in backends if one not in _BASELINES]
    if wanted is None and not own:
        raise InvalidArgumentError(
            f"--network: expected all-reduces of a backend in {name}, found {', '.join(backends) or 'none'}"
        )
    return own[0] if wanted is None else wanted


def fit(times: Sequence[AllReduceTime], nodes: int, ring_bytes: float, name: str) -> Link:
    """Return the link with the smallest sum of squared relative errors.

    Let an all-reduce of `m` messages and `b` bytes take `t` seconds. The fit finds the latency `x` and the seconds per byte `y`
    for which (m x + b y) / t is closest to 1 over all measured all-reduces.

    Raises:
        InvalidArgumentError: there are fewer than two different sizes, or larger tensors do not take longer. The text contains
            `name`.
    """
    if len({time.nbytes for time in times}) < 2:
        raise InvalidArgumentError(
            f"--network: expected all-reduces of float32 of two sizes or more from {LEAST_BYTES} bytes on in {name}, found "
            f"{len(times)}; measure with syncline bench --sizes 64K 64M"
        )
    rows = [
        (messages(nodes, one.nbytes, ring_bytes) / one.seconds, volume(nodes, one.nbytes, ring_bytes) / one.seconds)
        for one in times
    ]
    aa, ab, bb = (sum(x * y for x, y in pairs) for pairs in _products(rows))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    latency_s, per_byte_s = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    # If the fit gives a negative latency, set the latency to 0 and fit only the bandwidth.
    if latency_s < 0:
        latency_s, per_byte_s = 0.0, b / bb
    if per_byte_s <= 0:
        raise InvalidArgumentError(f"--network: in {name} larger tensors do not take longer: measure larger ones")
    return Link(latency_s, 1 / per_byte_s)


def _products(rows: Sequence[tuple[float, float]]) -> tuple[list[tuple[float, float]], ...]:
    return [(a, a) for a, _ in rows], [(a, b) for a, b in rows], [(b, b) for _, b in rows]
