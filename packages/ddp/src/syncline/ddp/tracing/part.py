"""The trace of one rank. Each line of its file is a JSON object, so the file stays readable if the job dies."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from syncline.collectives import InvalidArgumentError
from syncline.collectives.internal import read_each

from .clock import ClockOffset
from .events import BucketEvent, BucketLayout, CallEvent, OptimizerEvent, StepEvent

logger = logging.getLogger("syncline.ddp")

VERSION = 2
PATTERN = "trace-rank-*.jsonl"


def part_path(folder: Path, rank: int) -> Path:
    """Return the path of one rank's file."""
    return folder / f"trace-rank-{rank:05d}.jsonl"


@dataclass(frozen=True)
class Header:
    """The first line of a part. A part is the file with the trace of one rank.

    Attributes:
        rank, size: the rank in the group whose ranks average their gradients, and the size of this group.
        group: a description of the group, such as "mpi: MPICH 4.3.0".
        epoch_s: `time.time()` minus `time.perf_counter()` on this rank, in seconds.
        run: the name of the run. All ranks have the same name. In sorted order, names of later runs come later.
    """

    rank: int
    size: int
    host: str
    pid: int
    group: str
    epoch_s: float
    run: str


@dataclass(frozen=True)
class Part:
    """The trace of one rank. All times are times of this rank's own clock.

    Attributes:
        clocks: the offsets to rank 0's clock, in the order of measurement.
        layouts: the layouts of buckets. Each time the reducer builds buckets, there is a new layout.
        steps: the steps, in their order.
        is_complete: whether the file ends with the last line of a complete trace.
    """

    header: Header
    clocks: tuple[ClockOffset, ...] = ()
    layouts: tuple[tuple[BucketLayout, ...], ...] = ()
    steps: tuple[StepEvent, ...] = ()
    is_complete: bool = False


def header_line(header: Header) -> str:
    """Return the first line of a rank's file."""
    return _line("header", {"version": VERSION, **asdict(header)})


def clock_line(clock: ClockOffset) -> str:
    """Return a line for a measurement of the clock."""
    return _line("clock", asdict(clock))


def layout_line(buckets: Iterable[BucketLayout]) -> str:
    """Return a line for a layout of buckets. Steps refer to a layout by its index in the file."""
    return _line("layout", {"buckets": [asdict(bucket) for bucket in buckets]})


def step_line(step: StepEvent) -> str:
    """Return a line for a step."""
    return _line("step", asdict(step))


def end_line() -> str:
    """Return the last line of a complete trace."""
    return _line("end", {})


def _line(kind: str, content: Mapping[str, Any]) -> str:
    return json.dumps({"kind": kind, **content}) + "\n"


def read_parts(folder: Path) -> list[Part]:
    """Return the traces (parts) of the latest run in a folder, sorted by rank. Log a warning for each file that cannot be read.

    Raises:
        InvalidArgumentError: there is no part that can be read.
    """
    # An earlier run with more ranks, or with another version of Syncline, may have left a file that cannot be read.
    warn = partial(logger.warning, "left out of the trace: %s")
    parts = read_each(sorted(folder.glob(PATTERN)), read_part, warn)
    if not parts:
        raise InvalidArgumentError(f"expected files {PATTERN} in {folder}, found none; trace with SYNCLINE_TRACE={folder}")
    # A folder may still hold files of ranks that only an earlier, larger run had.
    latest = max(part.header.run for part in parts)
    return sorted((part for part in parts if part.header.run == latest), key=lambda part: part.header.rank)


def read_part(path: Path) -> Part:
    """Read the trace of one rank (a part) from its file. An incomplete last line is left out.

    Raises:
        InvalidArgumentError: the file is not a part.
    """
    try:
        return parse_part(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is no trace of a rank: {type(error).__name__}: {error}") from error


def parse_part(text: str) -> Part:
    """Read the trace of one rank (a part) from the text of its file.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, RecursionError: the text is not a part, or is a part of another
            version.
    """
    # Each complete line ends in a newline, so `rest` is empty or a line that was cut off.
    *whole, rest = text.split("\n")
    contents = [json.loads(line) for line in whole]
    if not contents or contents[0].pop("kind", None) != "header":
        raise ValueError(f"expected a header in the first line, found {(whole or [rest])[0][:60]!r}")
    if contents[0].pop("version", None) != VERSION:
        raise ValueError(f"expected version {VERSION}: read it with the version of Syncline that wrote it")
    of_kind: dict[str, list[dict[str, Any]]] = {"clock": [], "layout": [], "step": [], "end": []}
    for content in contents[1:]:
        of_kind[content.pop("kind")].append(content)
    return Part(
        Header(**contents[0]),
        tuple(ClockOffset(**clock) for clock in of_kind["clock"]),
        tuple(tuple(_layout(bucket) for bucket in layout["buckets"]) for layout in of_kind["layout"]),
        tuple(_step(step) for step in of_kind["step"]),
        bool(of_kind["end"]),
    )


def _layout(content: Mapping[str, Any]) -> BucketLayout:
    return BucketLayout(int(content["nbytes"]), tuple(content["names"]), tuple(map(tuple, content["shapes"])))


def _step(content: dict[str, Any]) -> StepEvent:
    return StepEvent(
        **{
            **content,
            "buckets": tuple(BucketEvent(**bucket) for bucket in content["buckets"]),
            "optimizers": tuple(OptimizerEvent(**one) for one in content["optimizers"]),
            "calls": tuple(CallEvent(**call) for call in content["calls"]),
        }
    )
