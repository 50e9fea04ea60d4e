"""Traces of real steps, with ranks that are threads."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.collectives import DisagreementError, InvalidArgumentError, MisuseError, ProcessGroup
from syncline.collectives.engine.observers import observe_calls, observers
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel, distributed_data_parallel
from syncline.ddp.tracing import TraceSettings
from syncline.ddp.tracing import recorder as recorder_module
from syncline.ddp.tracing.clock import measure_offset
from syncline.ddp.tracing.optimizer_steps import OptimizerSteps
from syncline.ddp.tracing.part import read_parts
from syncline.ddp.tracing.recorder import StepRecorder
from syncline.ddp.tracing.trace_file import read_timeline
from test_support.jobs import LIMIT_S

pytestmark = pytest.mark.ranks

TINY_CAP_MB = 100 / 2**20


def a_network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))


def train(model: torch.nn.Module, rank: int, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def traced(group: ProcessGroup, network: torch.nn.Module, folder: Path, *steps: Any, count: int = 6) -> dict[str, torch.Tensor]:
    model = DistributedDataParallel(copy.deepcopy(network), process_group=group, bucket_cap_mb=TINY_CAP_MB)
    with model.trace(folder, *steps):
        train(model, group.rank, count)
    return model.module.state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clocks_of_one_process_differ_by_less_than_is_stated(world_size: int) -> None:
    offsets = run_ranks(world_size, measure_offset)
    assert offsets[0].error_s == 0.0
    for offset in offsets:
        assert abs(offset.offset_s) <= offset.error_s


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trace_of_some_steps(world_size: int, tmp_path: Path) -> None:
    network = a_network()
    run_ranks(world_size, traced, network, tmp_path, 2, 4)
    timeline = read_timeline(tmp_path)
    assert [rank.header.rank for rank in timeline.ranks] == list(range(world_size))
    assert timeline.steps == [2, 3, 4]
    assert timeline.error_s is not None
    names = {name for name, _ in network.named_parameters()}
    for rank in timeline.ranks:
        for step in rank.steps.values():
            layout = rank.layouts[step.layout]
            assert {name for bucket in layout for name in bucket.names} == names
            assert [bucket.number for bucket in step.buckets] == list(range(len(layout)))
            assert len(layout) > 1
            assert step.forward_started < step.forward_ended < step.backward_started < step.last_gradient < step.finished
            for bucket in step.buckets:
                assert step.backward_started <= bucket.ready <= bucket.started <= bucket.finished <= step.finished
            (optimizer,) = step.optimizers
            assert step.finished < optimizer.started < optimizer.finished
            assert optimizer.name == "SGD"


def test_an_optimizer_whose_first_group_is_empty_is_observed() -> None:
    weight, foreign = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    steps = OptimizerSteps([weight])
    try:
        torch.optim.SGD([{"params": []}, {"params": [weight]}], lr=0.1).step()
        torch.optim.Adam([{"params": []}, {"params": [foreign]}]).step()
    finally:
        steps.stop()
    assert [event.name for event in steps.take()] == ["SGD"]


def test_other_calls_are_those_that_are_no_buckets(tmp_path: Path) -> None:
    run_ranks(2, traced, a_network(), tmp_path, 2, 4)
    for rank in read_timeline(tmp_path).ranks:
        for step in rank.steps.values():
            assert {call.name for call in step.calls} == {"broadcast"}  # running statistics
            for call in step.calls:
                assert step.finished <= call.started <= call.finished  # before what counts as the next forward


def test_two_recordings_of_a_rank_each_know_their_buckets(tmp_path: Path) -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(a_network(), process_group=group, bucket_cap_mb=TINY_CAP_MB)
        with model.trace(tmp_path / "first", 2, 4), model.trace(tmp_path / "second", 2, 4):
            train(model, group.rank, 6)

    run_ranks(2, body)
    for folder in ("first", "second"):
        for rank in read_timeline(tmp_path / folder).ranks:
            assert {call.name for step in rank.steps.values() for call in step.calls} == {"broadcast"}


def test_rank_0_merges_the_files(tmp_path: Path) -> None:
    run_ranks(2, traced, a_network(), tmp_path, 2, 4)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert names.count("optimizer: SGD") == names.count("forward") == names.count("waiting") == 3
    assert [part.is_complete for part in read_parts(tmp_path)] == [True, True]


def test_training_is_the_same_bit_by_bit(tmp_path: Path) -> None:
    network = a_network()

    def untraced(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = DistributedDataParallel(copy.deepcopy(network), process_group=group, bucket_cap_mb=TINY_CAP_MB)
        train(model, group.rank, 6)
        return model.module.state_dict()

    for ours, theirs in zip(run_ranks(2, traced, network, tmp_path), run_ranks(2, untraced), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_nothing_stays_behind(tmp_path: Path) -> None:
    before = ProcessGroup.all_reduce, torch.optim.SGD.step
    run_ranks(2, traced, a_network(), tmp_path, 2, 4)
    assert (ProcessGroup.all_reduce, torch.optim.SGD.step) == before
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks


def test_a_trace_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "made" / "here"
    monkeypatch.setenv("SYNCLINE_TRACE", str(folder))
    monkeypatch.setenv("SYNCLINE_TRACE_STEPS", "1-2")

    def body(group: ProcessGroup) -> None:
        for count in (3, 1):  # of two models the first is traced
            train(DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group), group.rank, count)

    run_ranks(2, body)
    assert read_timeline(folder).steps == [1, 2]
    assert (folder / "trace.json").exists()


@pytest.mark.parametrize("when", ["before the first traced step", "within the traced steps"])
@pytest.mark.parametrize("by_environment", [True, False])
def test_a_trace_stays_in_its_folder_if_the_working_directory_changes(
    when: str, by_environment: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    if by_environment:
        monkeypatch.setenv("SYNCLINE_TRACE", "traces")
        monkeypatch.setenv("SYNCLINE_TRACE_STEPS", "3-5")

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
        with contextlib.nullcontext() if by_environment else model.trace("traces", 3, 5):
            train(model, 0, 1 if when.startswith("before") else 4)
            monkeypatch.chdir(tmp_path / "elsewhere")
            train(model, 0, 5)

    run_ranks(1, body)
    assert read_timeline(tmp_path / "traces").steps == [3, 4, 5]
    assert (tmp_path / "traces" / "trace.json").exists()


def test_a_model_that_is_checked_for_one_step_does_not_take_the_place_of_the_one_that_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCLINE_TRACE", str(tmp_path))
    monkeypatch.setenv("SYNCLINE_TRACE_STEPS", "3-4")

    def body(group: ProcessGroup) -> None:
        for count in (1, 5):
            train(DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group), group.rank, count)

    run_ranks(2, body)
    assert read_timeline(tmp_path).steps == [3, 4]


def test_a_program_whose_steps_are_too_few_says_so(python: list[str], tmp_path: Path) -> None:
    program = """
import torch
from syncline.ddp import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(1, 4)).sum().backward()
"""
    ended = subprocess.run(
        [
            *python,
            "-c",
            "from syncline.collectives import init_process_group; init_process_group('in_process')" + program,
        ],
        env={**os.environ, "SYNCLINE_TRACE": str(tmp_path / "traces")},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert "no model came to step 10; say which steps by SYNCLINE_TRACE_STEPS" in ended.stderr


def train_and_end(group: ProcessGroup, steps: int) -> None:
    """As a process that ends."""
    model = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
    train(model, group.rank, steps)
    (recording,) = model._recordings
    assert recording._end_at_exit is not None
    recording._end_at_exit()


def test_a_job_that_ends_early_leaves_what_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCLINE_TRACE", str(tmp_path))
    monkeypatch.setenv("SYNCLINE_TRACE_STEPS", "2-20")

    with caplog.at_level(logging.WARNING, "syncline.ddp"):
        run_ranks(2, lambda group: train_and_end(group, 4))
    (told,) = caplog.messages
    assert told.startswith("the trace was not merged: the program ended")
    assert told.endswith(f"Run syncline trace {tmp_path}")
    assert read_timeline(tmp_path).steps == [2, 3, 4]
    assert [part.is_complete for part in read_parts(tmp_path)] == [False, False]
    assert not (tmp_path / "trace.json").exists()


def test_a_job_that_ends_before_the_first_traced_step_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCLINE_TRACE", str(tmp_path))
    monkeypatch.setenv("SYNCLINE_TRACE_STEPS", "3-20")

    with caplog.at_level(logging.WARNING, "syncline.ddp"):
        run_ranks(2, lambda group: train_and_end(group, 2))
    (told,) = caplog.messages
    assert told.startswith(f"nothing was traced to {tmp_path}: the program ended")
    assert told.endswith("before the end of step 3")


def test_an_error_within_a_trace_leaves_what_it_has(tmp_path: Path) -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
        with pytest.raises(KeyError):
            train_and_fail(model, group.rank)
        train(model, group.rank, 2)

    def train_and_fail(model: DistributedDataParallel, rank: int) -> None:
        with model.trace(tmp_path):
            train(model, rank, 3)
            raise KeyError("a bug of the script")

    run_ranks(2, body)
    assert read_timeline(tmp_path).steps == [1, 2, 3]


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "syncline.ddp"):
        run_ranks(2, traced, a_network(), tmp_path / "file" / "folder")
    assert any("rank 1 cannot write its trace" in message for message in caplog.messages)
    assert all("Error" not in message or "cannot write" in message for message in caplog.messages)


def test_a_rank_that_cannot_write_does_not_stop_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trace-rank-00001.jsonl").mkdir()
    with caplog.at_level(logging.WARNING, "syncline.ddp"):
        run_ranks(2, traced, a_network(), tmp_path)
    assert any("rank 1 cannot write its trace" in message for message in caplog.messages)
    assert any("trace-rank-00001.jsonl is no trace of a rank" in message for message in caplog.messages)
    assert any("trace.json lacks rank(s) 1: copy the files" in message for message in caplog.messages)
    assert [rank.header.rank for rank in read_timeline(tmp_path).ranks] == [0]


def test_ranks_with_different_numbers_of_steps_end_without_one_another(tmp_path: Path) -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
        with model.trace(tmp_path, 1, 3), model.join():
            train(model, group.rank, 2 + 3 * group.rank)

    run_ranks(2, body)
    short, long = read_parts(tmp_path)
    assert [step.number for step in short.steps] == [1, 2]
    assert [step.number for step in long.steps] == [1, 2, 3]


@pytest.mark.parametrize(("steps", "traced_steps"), [((2, 4), "2 to 4"), ((2,), "2 to 6"), ((5, 9), "5 to 6")])
def test_the_log_names_the_traced_steps(
    steps: tuple[int, ...], traced_steps: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "syncline.ddp"):
        run_ranks(2, traced, a_network(), tmp_path, *steps)
    assert [message for message in caplog.messages if message.startswith(f"traced steps {traced_steps}: open")]


@pytest.mark.parametrize("count", [2, 3])
def test_the_trace_of_an_earlier_run_is_not_announced_as_new(
    count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(2, traced, a_network(), tmp_path)
    before = (tmp_path / "trace.json").read_bytes()
    with caplog.at_level(logging.INFO, "syncline.ddp"):
        run_ranks(2, lambda group: traced(group, a_network(), tmp_path, 4, count=count))
    assert not any("traced steps" in message for message in caplog.messages)
    assert any(f"the model made {count} steps, and the first step to trace is step 4" in said for said in caplog.messages)
    assert (tmp_path / "trace.json").read_bytes() == before


def test_a_trace_cannot_begin_within_join(tmp_path: Path) -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
        with model.join():
            with pytest.raises(MisuseError, match="within join"), model.trace(tmp_path):
                pass
            train(model, group.rank, 1)

    run_ranks(2, body)


def test_steps_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
        for steps in ((0, 3), (4, 3)):
            with pytest.raises(InvalidArgumentError, match="expected 1 <= first <= last"), model.trace(tmp_path, *steps):
                pass

    run_ranks(1, body)


def test_ranks_that_do_not_all_trace_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(DisagreementError, match=r"SYNCLINE_TRACE.*='10-20' on rank 0 and None on rank 1"):
            DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)

    def of_this_rank(_: object) -> TraceSettings | None:
        return TraceSettings(tmp_path, 10, 20) if "rank 0" in threading.current_thread().name else None

    monkeypatch.setattr(distributed_data_parallel, "settings_from", of_this_rank)
    run_ranks(2, body)


def test_calls_are_observed_while_somebody_does() -> None:
    def body(group: ProcessGroup) -> list[tuple[str, bool]]:
        seen = []
        stop = observe_calls(
            lambda call, _: seen.append((call.name, call.finished is not None)) if call.group is group else None
        )
        tensor = torch.ones(3)
        group.all_reduce(tensor)
        group.barrier()
        stop()
        group.broadcast(tensor)
        return seen

    assert run_ranks(2, body) == [[("all_reduce", True), ("barrier", True)]] * 2


def test_a_disk_that_fills_up_ends_the_observation_of_calls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = StepRecorder._write, set[StepRecorder]()

    def once(recorder: StepRecorder) -> None:
        if recorder in written:
            raise OSError("no space left on device")
        written.add(recorder)
        write(recorder)

    monkeypatch.setattr(StepRecorder, "_write", once)
    monkeypatch.setattr(recorder_module, "_WRITE_EVERY_S", 0.0)
    with caplog.at_level(logging.WARNING, "syncline.ddp"):
        run_ranks(2, traced, a_network(), tmp_path)
    assert sum("no space left" in message for message in caplog.messages) == 2
    assert observers == []


def test_a_disk_that_is_full_at_the_end_of_the_process_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: StepRecorder) -> None:
        raise OSError("no space left on device")

    monkeypatch.setenv("SYNCLINE_TRACE", str(tmp_path))
    monkeypatch.setenv("SYNCLINE_TRACE_STEPS", "2-20")

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
        train(model, group.rank, 4)
        (recording,) = model._recordings
        monkeypatch.setattr(StepRecorder, "_write", refuse)
        assert recording._end_at_exit is not None
        recording._end_at_exit()  # as at the end of the process

    with caplog.at_level(logging.WARNING, "syncline.ddp"):
        run_ranks(1, body)
    assert any("rank 0 cannot write its trace" in message for message in caplog.messages)


def test_a_forked_child_that_exits_leaves_the_trace_to_its_parent(tmp_path: Path) -> None:
    """`sys.exit` runs what is to run at the exit of Python."""
    script = """
import os, sys, torch
from syncline.ddp import DistributedDataParallel

ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)))
def step():
    ddp.zero_grad()
    ddp(torch.ones(1, 2)).sum().backward()
with ddp.trace(sys.argv[1]):
    step()
    step()
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    step()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], check=True, timeout=LIMIT_S)
    text = (tmp_path / "trace-rank-00000.jsonl").read_text()
    steps = [line["number"] for line in map(json.loads, text.splitlines()) if line["kind"] == "step"]
    assert steps == [1, 2, 3]
