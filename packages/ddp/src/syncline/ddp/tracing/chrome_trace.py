"""Convert a timeline to the Chrome trace format, which ui.perfetto.dev and chrome://tracing open.

The viewers show each rank as a process with the threads `steps`, `buckets` and `other calls`. Buckets that overlap in time get
further threads: `buckets, 2` and so on. For each bucket, arrows go from each rank to the rank that started the bucket last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import Any, TypeAlias

from .events import BucketEvent, BucketLayout, CallEvent, StepEvent
from .timeline import RankTimeline, Timeline

Event: TypeAlias = dict[str, Any]

_STEPS, _BUCKETS, _CALLS = 1, 100, 1000
_MOST_NAMES = 20

_Starts: TypeAlias = dict[tuple[int, int], list[tuple[float, int, int]]]
"""For each bucket of each step, the bucket's start on each rank: time, process (pid) and thread (tid)."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace as an object for `json.dumps`. Times are in microseconds since the first event."""
    origin = origin_of(timeline)
    events: list[Event] = []
    starts: _Starts = {}
    for rank in timeline.ranks:
        events += _rank_events(rank, origin, starts)
    events += _arrows(starts, frozenset(timeline.steps), origin)
    error = timeline.error_s
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "writer": "syncline",
            "ranks": timeline.size,
            "missing ranks": list(timeline.missing),
            "clocks are aligned within, us": None if error is None else round(1e6 * error, 1),
        },
    }


def origin_of(timeline: Timeline) -> float:
    """Return the time of the first event on rank 0's clock."""
    return min((step.forward_started for rank in timeline.ranks for step in rank.steps.values()), default=0.0)


def _rank_events(rank: RankTimeline, origin: float, starts: _Starts) -> Iterator[Event]:
    pid = rank.header.rank
    yield _name(pid, None, f"rank {pid} ({rank.header.host})")
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    yield _name(pid, _STEPS, "steps")
    lanes = _Lanes(pid, _BUCKETS, "buckets")
    calls = _Lanes(pid, _CALLS, "other calls")
    steps = [rank.steps[number] for number in sorted(rank.steps)]
    ends = [later.forward_started for later in steps[1:]] + [_end(step) for step in steps[-1:]]
    for step, end in zip(steps, ends, strict=True):
        yield from _step_events(pid, step, end if step.number + 1 in rank.steps else _end(step), origin)
        for bucket in step.buckets:
            tid = lanes.lane(bucket.ready, bucket.finished)
            starts.setdefault((step.number, bucket.number), []).append((bucket.started, pid, tid))
            yield from _bucket_events(pid, tid, step, bucket, rank.layouts[step.layout], origin)
        for call in step.calls:
            yield _call_event(pid, calls.lane(call.started, call.finished), call, origin)
    yield from lanes.names()
    yield from calls.names()


def _end(step: StepEvent) -> float:
    """Return the time when a step ended, if the step after it was not traced."""
    return max([step.finished, *(one.finished for one in step.optimizers), *(one.finished for one in step.calls)])


def _step_events(pid: int, step: StepEvent, end: float, origin: float) -> Iterator[Event]:
    args = {"exposed communication, ms": 1e3 * step.waited_s, "buckets": len(step.buckets)}
    yield _slice(pid, _STEPS, f"step {step.number}", step.forward_started, end, origin, args)
    if step.forward_ended:
        yield _slice(pid, _STEPS, "forward", step.forward_started, step.forward_ended, origin)
        yield _slice(pid, _STEPS, "loss", step.forward_ended, step.backward_started, origin)
    yield _slice(pid, _STEPS, "backward", step.backward_started, step.finalize_started, origin)
    yield _slice(pid, _STEPS, "waiting", step.finalize_started, step.finished, origin)
    for one in step.optimizers:
        yield _slice(pid, _STEPS, f"optimizer: {one.name}", one.started, one.finished, origin)


def _bucket_events(
    pid: int, tid: int, step: StepEvent, bucket: BucketEvent, layout: Sequence[BucketLayout], origin: float
) -> Iterator[Event]:
    names = layout[bucket.number].names if bucket.number < len(layout) else ()
    shown = [*names[:_MOST_NAMES], *([f"and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else [])]
    args = {"step": step.number, "bytes": bucket.nbytes, "parameters": shown}
    yield _slice(pid, tid, f"bucket {bucket.number}", bucket.ready, bucket.finished, origin, args)
    yield _slice(pid, tid, "collect", bucket.ready, bucket.started, origin)
    yield _slice(pid, tid, "reduce", bucket.started, bucket.finished, origin)


def _call_event(pid: int, tid: int, call: CallEvent, origin: float) -> Event:
    return _slice(pid, tid, call.name, call.started, call.finished, origin, {"group": call.group, "bytes": call.nbytes})


def _arrows(starts: _Starts, steps: Collection[int], origin: float) -> Iterator[Event]:
    numbers = count()
    for (step, _), ranks in starts.items():
        if step in steps:
            last, last_pid, last_tid = max(ranks)
            for started, pid, tid in ranks:
                # The last rank waits for nobody.
                if pid != last_pid:
                    number = next(numbers)
                    yield _flow("s", number, pid, tid, started, origin)
                    yield {**_flow("f", number, last_pid, last_tid, last, origin), "bp": "e"}


def _flow(phase: str, number: int, pid: int, tid: int, time: float, origin: float) -> Event:
    ts = _us(time, origin)
    # The id is an integer, because Perfetto leaves out arrows with other ids.
    return {"ph": phase, "cat": "bucket", "name": "waits for the last rank", "id": number, "pid": pid, "tid": tid, "ts": ts}


class _Lanes:
    """The threads of the trace for one kind of slice. Slices that overlap get different threads."""

    def __init__(self, pid: int, first: int, name: str) -> None:
        self._pid = pid
        self._first = first
        self._name = name
        self._ends: list[float] = []

    def lane(self, started: float, finished: float) -> int:
        """Return the thread for the next slice. Call this method in the order in which slices start."""
        number = next((number for number, end in enumerate(self._ends) if end <= started), len(self._ends))
        self._ends[number : number + 1] = [finished]
        return self._first + number

    def names(self) -> Iterator[Event]:
        for number in range(len(self._ends)):
            yield _name(self._pid, self._first + number, self._name if number == 0 else f"{self._name}, {number + 1}")


def _slice(
    pid: int, tid: int, name: str, started: float, finished: float, origin: float, args: dict[str, Any] | None = None
) -> Event:
    ts = _us(started, origin)
    event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": max(0.0, round(_us(finished, origin) - ts, 3))}
    return event if args is None else {**event, "args": args}


def _name(pid: int, tid: int | None, name: str) -> Event:
    kind = "process_name" if tid is None else "thread_name"
    place = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return {"ph": "M", "name": kind, **place, "args": {"name": name}}


def _us(time: float, origin: float) -> float:
    return round(1e6 * (time - origin), 3)
