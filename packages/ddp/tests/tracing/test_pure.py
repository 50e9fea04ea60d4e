"""What a trace is made of: settings, clocks, files, the merged timeline, the Chrome trace format. No ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from syncline.collectives import InvalidArgumentError
from syncline.ddp.tracing.chrome_trace import chrome_trace
from syncline.ddp.tracing.clock import ClockOffset, RoundTrip, best_offset
from syncline.ddp.tracing.events import BucketEvent, BucketLayout, CallEvent, OptimizerEvent, StepEvent
from syncline.ddp.tracing.part import (
    Header,
    Part,
    clock_line,
    end_line,
    header_line,
    layout_line,
    parse_part,
    part_path,
    read_parts,
    step_line,
)
from syncline.ddp.tracing.profiler_trace import add_profiler_trace
from syncline.ddp.tracing.settings import TraceSettings, parse_steps, settings_from
from syncline.ddp.tracing.timeline import clock_of, error_of, merge

LAYOUT = (BucketLayout(400, ("head.bias", "head.weight")), BucketLayout(80, ("body.weight",)))


def a_header(rank: int = 0, size: int = 2, run: str = "a") -> Header:
    return Header(rank, size, f"host{rank}", 100 + rank, "mpi: Some MPI 1.2", 1000.0, run)


def a_step(number: int = 10, began: float = 5.0, late: float = 0.0) -> StepEvent:
    """10 ms of forward, 20 of backward (and `late` more), two buckets, 5 ms of waiting, 2 of the optimizer."""
    ready = began + 0.020 + late
    return StepEvent(
        number,
        0,
        began,
        began + 0.010,
        began + 0.012,
        began + 0.030 + late,
        began + 0.031 + late,
        began + 0.036 + late,
        0.005,
        (
            BucketEvent(0, 400, ready, ready + 0.001, began + 0.033 + late),
            BucketEvent(1, 80, ready + 0.010, ready + 0.011, began + 0.035 + late),
        ),
        (OptimizerEvent("SGD", began + 0.037 + late, began + 0.039 + late),),
        (CallEvent("broadcast", "default", 8, began + 0.001, began + 0.002),),
    )


def text_of(part: Part) -> str:
    lines = [
        header_line(part.header),
        *map(clock_line, part.clocks),
        *map(layout_line, part.layouts),
        *map(step_line, part.steps),
    ]
    return "".join([*lines, end_line() if part.is_complete else ""])


# ---- settings ----


def test_nothing_is_traced_without_a_folder() -> None:
    assert settings_from({}) is None
    assert settings_from({"SYNCLINE_TRACE": "", "SYNCLINE_TRACE_STEPS": "1-2"}) is None


def test_settings_of_the_environment() -> None:
    here = Path.cwd() / "here"
    assert settings_from({"SYNCLINE_TRACE": "here"}) == TraceSettings(here, 10, 20)
    assert settings_from({"SYNCLINE_TRACE": "here", "SYNCLINE_TRACE_STEPS": "3-3"}) == TraceSettings(here, 3, 3)


@pytest.mark.parametrize(("text", "steps"), [("10-20", (10, 20)), (" 1 - 2 ", (1, 2)), ("7", (7, 7))])
def test_steps(text: str, steps: tuple[int, int]) -> None:
    assert parse_steps(text, "STEPS") == steps


@pytest.mark.parametrize("text", ["", "0-3", "5-4", "ten", "1-2-3", "-4", "1.5"])
def test_steps_that_make_no_sense(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"STEPS: expected the first and the last step.*such as 10-20"):
        parse_steps(text, "STEPS")


def test_a_removed_working_directory_is_no_error_before_the_trace_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert settings_from({"SYNCLINE_TRACE": "here"}) == TraceSettings(Path("here"), 10, 20)


# ---- clocks ----


def test_the_shortest_round_trip_counts() -> None:
    rounds = [RoundTrip(10.0, 3.9, 11.0), RoundTrip(20.0, 13.05, 20.1), RoundTrip(30.0, 23.0, 34.0)]
    offset = best_offset(rounds)
    assert offset.at == 13.05
    assert offset.offset_s == pytest.approx(7.0)
    assert offset.error_s == pytest.approx(0.05)


def test_between_two_measurements_a_clock_drifts_evenly() -> None:
    clock = clock_of([ClockOffset(100.0, 2.0, 1e-6), ClockOffset(200.0, 2.5, 1e-6)])
    assert [clock(100.0), clock(150.0), clock(200.0)] == [102.0, 152.25, 202.5]


def test_one_measurement_is_an_offset_and_none_leaves_times_alone() -> None:
    assert clock_of([ClockOffset(100.0, 2.0, 1e-6)])(150.0) == 152.0
    assert clock_of([])(150.0) == 150.0


def test_the_error_of_a_clock() -> None:
    once = Part(a_header(1), (ClockOffset(1.0, 0.0, 3e-6),), (LAYOUT,), (a_step(),))
    twice = replace(once, clocks=(*once.clocks, ClockOffset(6.0, 0.0, 4e-6)))
    assert error_of(twice) == 4e-6
    assert error_of(once) == pytest.approx(3e-6 + 50e-6 * (5.036 - 1.0))
    assert error_of(replace(once, clocks=())) is None
    assert error_of(replace(once, header=a_header(0), clocks=())) == 0.0


# ---- files ----


def test_a_part_is_what_was_written() -> None:
    part = Part(a_header(), (ClockOffset(1.0, 2.0, 3.0),), (LAYOUT,), (a_step(10), a_step(11, 6.0)), is_complete=True)
    assert parse_part(text_of(part)) == part


def test_of_a_job_that_died_the_whole_lines_are_read() -> None:
    part = Part(a_header(), (ClockOffset(1.0, 2.0, 3.0),), (LAYOUT,), (a_step(10), a_step(11, 6.0)))
    assert parse_part(text_of(part)[:-40]) == replace(part, steps=part.steps[:1])


@pytest.mark.parametrize(
    "text",
    [
        *["", "{}\n", '{"kind": "step"}\n', "no JSON\n", "3\n", "[" * 100_000 + "\n"],
        header_line(a_header()).replace('"version": 2', '"version": 1'),
        header_line(a_header()) + "3\n",
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    part_path(tmp_path, 0).write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"trace-rank-00000\.jsonl is no trace of a rank"):
        read_parts(tmp_path)


def test_an_empty_folder_is_an_error_that_says_how_to_trace(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="found none; trace with SYNCLINE_TRACE="):
        read_parts(tmp_path)


def test_what_an_earlier_run_with_more_ranks_left_is_not_read(tmp_path: Path) -> None:
    earlier = [Part(a_header(rank, 3, "18a"), steps=(a_step(),)) for rank in range(3)]
    later = [Part(a_header(rank, 2, "18b"), steps=(a_step(),)) for rank in range(2)]
    for part in (*earlier, *later):
        part_path(tmp_path, part.header.rank).write_text(text_of(part))
    assert read_parts(tmp_path) == later


def test_a_run_that_was_killed_before_its_first_step_is_the_latest(tmp_path: Path) -> None:
    earlier = Part(a_header(2, 3, "18a"), (ClockOffset(1.0, 2.0, 3.0),), (LAYOUT,), (a_step(),))
    later = [Part(a_header(rank, 2, "18b")) for rank in range(2)]
    for part in (earlier, *later):
        part_path(tmp_path, part.header.rank).write_text(text_of(part))
    assert read_parts(tmp_path) == later


def test_a_file_that_another_version_left_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    part = Part(a_header(0, 1), steps=(a_step(),))
    part_path(tmp_path, 0).write_text(text_of(part))
    part_path(tmp_path, 1).write_text(header_line(a_header(1)).replace('"version": 2', '"version": 1'))
    assert read_parts(tmp_path) == [part]
    assert "trace-rank-00001.jsonl is no trace of a rank" in caplog.text


# ---- the timeline ----


def test_ranks_are_put_on_rank_0s_clock() -> None:
    parts = [
        Part(a_header(0), (ClockOffset(0.0, 0.0, 0.0),), (LAYOUT,), (a_step(),)),
        Part(
            a_header(1), (ClockOffset(99.0, -100.0, 2e-6), ClockOffset(106.0, -100.0, 1e-6)), (LAYOUT,), (a_step(began=105.0),)
        ),
    ]
    timeline = merge(parts)
    first, second = timeline.of_step(10)
    assert second.forward_started == pytest.approx(first.forward_started)
    assert second.buckets[1].finished == pytest.approx(first.buckets[1].finished)
    assert second.calls[0].started == pytest.approx(first.calls[0].started)
    assert second.optimizers[0].finished == pytest.approx(first.optimizers[0].finished)
    assert timeline.error_s == 2e-6
    assert (timeline.missing, timeline.size, timeline.steps) == ((), 2, [10])


def test_missing_ranks_and_steps_are_known() -> None:
    parts = [Part(a_header(0, 3), steps=(a_step(10), a_step(11))), Part(a_header(2, 3), steps=(a_step(11), a_step(12)))]
    timeline = merge(parts)
    assert (timeline.missing, timeline.steps, timeline.error_s) == ((1,), [11], None)


def test_a_forward_whose_end_nobody_noted_stays_unknown() -> None:
    step = replace(a_step(), forward_ended=0.0)
    (moved,) = merge([Part(a_header(0, 1), (ClockOffset(0.0, 7.0, 0.0),), (LAYOUT,), (step,))]).of_step(10)
    assert (moved.forward_ended, moved.finished) == (0.0, step.finished + 7.0)


# ---- the Chrome trace format ----


def two_ranks(late: float = 0.004) -> list[Part]:
    clocks = (ClockOffset(0.0, 0.0, 0.0),)
    return [
        Part(a_header(0), clocks, (LAYOUT,), (a_step(10), a_step(11, 5.1))),
        Part(a_header(1), clocks, (LAYOUT,), (a_step(10, late=late), a_step(11, 5.1, late))),
    ]


def test_slices_of_a_step() -> None:
    trace = chrome_trace(merge(two_ranks()))
    mine = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 0]
    found = {event["name"]: (event["ts"], event["dur"]) for event in reversed(mine) if event["ts"] < 90_000}
    assert found == {
        "step 10": (0.0, 100_000.0),
        "forward": (0.0, 10_000.0),
        "loss": (10_000.0, 2_000.0),
        "backward": (12_000.0, 19_000.0),
        "waiting": (31_000.0, 5_000.0),
        "optimizer: SGD": (37_000.0, 2_000.0),
        "bucket 0": (20_000.0, 13_000.0),
        "bucket 1": (30_000.0, 5_000.0),
        "collect": (20_000.0, 1_000.0),
        "reduce": (21_000.0, 12_000.0),
        "broadcast": (1_000.0, 1_000.0),
    }
    bucket = next(event for event in mine if event["name"] == "bucket 0")
    assert bucket["args"] == {"step": 10, "bytes": 400, "parameters": ["head.bias", "head.weight"]}


def test_the_last_step_ends_with_its_last_event() -> None:
    events = chrome_trace(merge(two_ranks()))["traceEvents"]
    (last,) = [event for event in events if event["name"] == "step 11" and event["pid"] == 0]
    assert last["dur"] == 39_000.0


def test_slices_of_one_thread_lie_inside_or_after_one_another() -> None:
    events = chrome_trace(merge(two_ranks()))["traceEvents"]
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 2 * 4  # steps, two lanes of buckets, other calls
    for spans in threads.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        for before, after in itertools.pairwise(spans):
            assert not (before[0] < after[0] < before[1] < after[1])


def test_an_arrow_goes_from_each_rank_to_the_one_that_came_last() -> None:
    events = chrome_trace(merge(two_ranks()))["traceEvents"]
    starts = [event for event in events if event["ph"] == "s"]
    ends = [event for event in events if event["ph"] == "f"]
    assert [(event["pid"], event["ts"]) for event in starts] == [(0, 21_000.0), (0, 31_000.0), (0, 121_000.0), (0, 131_000.0)]
    assert [(event["pid"], event["ts"]) for event in ends] == [(1, 25_000.0), (1, 35_000.0), (1, 125_000.0), (1, 135_000.0)]
    # Numbers, or Perfetto would not draw them.
    assert [event["id"] for event in starts] == [event["id"] for event in ends] == [0, 1, 2, 3]
    slices = [event for event in events if event["ph"] == "X"]
    for arrow in (*starts, *ends):  # each end lies on a slice, or Perfetto would not draw it
        assert any(
            (one["pid"], one["tid"]) == (arrow["pid"], arrow["tid"]) and one["ts"] <= arrow["ts"] <= one["ts"] + one["dur"]
            for one in slices
        )


def test_the_trace_states_how_well_clocks_are_aligned() -> None:
    parts = two_ranks()
    parts[1] = replace(parts[1], clocks=(ClockOffset(0.0, 0.0, 2.5e-6), ClockOffset(9.0, 0.0, 1e-6)))
    assert chrome_trace(merge(parts))["otherData"]["clocks are aligned within, us"] == 2.5


def test_many_names_are_cut() -> None:
    layout = (BucketLayout(400, tuple(f"p{number}" for number in range(25))), LAYOUT[1])
    events = chrome_trace(merge([replace(two_ranks()[0], layouts=(layout,))]))["traceEvents"]
    names = next(event["args"]["parameters"] for event in events if event["name"] == "bucket 0")
    assert names[-2:] == ["p19", "and 5 more"]


def test_a_profile_is_moved_to_the_same_clock() -> None:
    timeline = merge(two_ranks())
    trace = chrome_trace(timeline)
    # The step began at 5.0 by rank 1's clock, which is 1005 s since the epoch.
    profile = {
        "baseTimeNanoseconds": 1_000 * 10**9,
        "traceEvents": [
            {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 5_000_100.0, "dur": 3.0},
            {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}},
            *({"ph": "s", "id": id, "name": "fwdbwd", "pid": 77, "tid": 77, "ts": 5_000_100.0} for id in (3, "0x4", 3)),
        ],
    }
    add_profiler_trace(trace, timeline, 1, profile, Path("profile.json"))
    operator, name, *flows = trace["traceEvents"][-5:]
    assert operator["ts"] == pytest.approx(100.0, abs=0.01)
    assert name["args"]["name"] == "profile of rank 1: python"
    assert [flow["id"] for flow in flows] == [2_000_000, 2_000_001, 2_000_000]
    assert operator["pid"] not in (0, 1)


@pytest.mark.parametrize(("rank", "profile", "words"), [(5, {"traceEvents": []}, "found rank 5"), (1, [], "no 'traceEvents'")])
def test_a_profile_that_does_not_fit_is_refused(rank: int, profile: object, words: str) -> None:
    timeline = merge(two_ranks())
    with pytest.raises(InvalidArgumentError, match=words):
        add_profiler_trace(chrome_trace(timeline), timeline, rank, profile, Path("profile.json"))
