"""Add a file of `torch.profiler` to a trace, with times of rank 0's clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from syncline.collectives import InvalidArgumentError

from .chrome_trace import origin_of
from .timeline import Timeline

_BEHIND = 1_000_000
"""The profiler's processes and arrows get numbers above all ranks. Perfetto leaves out arrows without a number as id."""


def add_profiler_trace(trace: dict[str, Any], timeline: Timeline, rank: int, profile: Any, path: Path) -> None:
    """Add a rank's profile to a trace, in place.

    The profiler uses the host's wall clock. If this clock is adjusted while the job runs, the profile is shifted.

    Args:
        trace: the result of `chrome_trace(timeline)`.
        timeline: the timeline of the trace.
        rank: the rank of the profile.
        profile: the content of a file of `export_chrome_trace`, read as JSON.
        path: the file's name, for error messages.

    Raises:
        InvalidArgumentError: the timeline lacks this rank, or the profile is not a Chrome trace.
    """
    taken_on = next((one for one in timeline.ranks if one.header.rank == rank), None)
    if taken_on is None:
        raise InvalidArgumentError(f"{path}: expected a profile of a rank that was traced, found rank {rank}")
    if not isinstance(profile, dict) or "traceEvents" not in profile:
        raise InvalidArgumentError(f"{path}: expected what torch.profiler's export_chrome_trace writes, found no 'traceEvents'")
    base_s = 1e-9 * float(profile.get("baseTimeNanoseconds", 0))
    shift_us = 1e6 * (base_s - taken_on.epoch_s - origin_of(timeline))
    trace["traceEvents"] += _moved(profile["traceEvents"], rank, shift_us)


def _moved(events: list[dict[str, Any]], rank: int, shift_us: float) -> Iterator[dict[str, Any]]:
    pids: dict[Any, int] = {}
    ids: dict[Any, int] = {}
    first = _BEHIND * (rank + 1)
    for event in events:
        pid = pids.setdefault(event.get("pid"), first + len(pids))
        moved = {**event, "pid": pid}
        # Events of kind M only name processes and threads; they have no time.
        if "ts" in event and event.get("ph") != "M":
            moved["ts"] = round(float(event["ts"]) + shift_us, 3)
        if "id" in event:
            moved["id"] = ids.setdefault(event["id"], first + len(ids))
        if event.get("name") == "process_name" and event.get("ph") == "M":
            moved["args"] = {"name": f"profile of rank {rank}: {event.get('args', {}).get('name', '')}"}
        yield moved
