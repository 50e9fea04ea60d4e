"""The benchmarks: their arithmetic as tables, and each run at a tiny size, for its form and not for its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import emulated_hosts, paper, step
from benchmarks.cases import FULL, QUICK, all_cases
from benchmarks.deferral import Deferral, deferred_hook
from benchmarks.latency_breakdown import breakdown
from benchmarks.memory import kib_in
from benchmarks.skipped_sync import smoothed, synchronizes
from benchmarks.summary import LEAST_RATIO, Summary, exposed_ratio, geometric_mean
from benchmarks.timing import Phases, slowest
from benchmarks.wire import minimum_bytes, sent_bytes
from commands import ToolError
from environment import ROOT

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("samples", "quartiles"),
    [([3.0], (3.0, 3.0, 3.0)), ([4.0, 1.0, 3.0, 2.0, 5.0], (2.0, 3.0, 4.0)), ([1.0, 2.0], (1.25, 1.5, 1.75))],
)
def test_a_summary_is_the_quartiles(samples: list[float], quartiles: tuple[float, ...]) -> None:
    assert Summary.of(samples) == Summary(*quartiles)


@pytest.mark.parametrize(
    ("ours", "native", "alone", "ratio"),
    [(3.0, 5.0, 1.0, 0.5), (1.0, 5.0, 1.0, 0.0), (0.5, 3.0, 1.0, -0.25), (3.0, 1.0, 1.0, None), (3.0, 0.5, 1.0, None)],
)
def test_exposed_communication_is_what_an_unsynchronised_step_lacks(
    ours: float, native: float, alone: float, ratio: float | None
) -> None:
    assert exposed_ratio(ours, native, alone) == ratio


@pytest.mark.parametrize(
    ("ratios", "mean"),
    [([], None), ([None], None), ([2.0, 8.0], 4.0), ([2.0, None, 8.0], 4.0), ([-1.0], LEAST_RATIO), ([0.0, 1.0], 0.1)],
)
def test_the_geometric_mean_is_of_what_is_known(ratios: list[float | None], mean: float | None) -> None:
    assert geometric_mean(ratios) == (None if mean is None else pytest.approx(mean))


@pytest.mark.parametrize(("hosts", "share"), [(1, 0.0), (2, 1.0), (3, 4 / 3), (4, 1.5)])
def test_the_least_that_a_host_sends(hosts: int, share: float) -> None:
    assert minimum_bytes(300, hosts) == pytest.approx(300 * share)


COUNTERS = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     1       2    3    4    5     6          7         8        9      10   11   12   13    14      15         16
 wire0:17 18 0 0 0 0 0 0 4200 19 0 0 0 0 0 0
"""


def test_what_a_device_has_sent_is_in_its_own_line() -> None:
    assert (sent_bytes(COUNTERS, "wire0"), sent_bytes(COUNTERS, "lo")) == (4200, 9)
    with pytest.raises(ValueError, match="no device 'wire'"):
        sent_bytes(COUNTERS, "wire")


def test_memory_is_read_by_its_whole_name() -> None:
    assert kib_in("Pss:    7 kB\nPss_Shmem:\t   12 kB\n", "Pss_Shmem") == 12
    with pytest.raises(ValueError, match="no VmHWM"):
        kib_in("XVmHWM: 1 kB\n", "VmHWM")


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
    first = [Phases(1, 1, 1), Phases(5, 0, 0)]
    second = [Phases(0, 0, 4), Phases(1, 1, 1)]
    assert slowest([first, second]) == [Phases(0, 0, 4), Phases(5, 0, 0)]


def test_where_a_step_goes() -> None:
    found = breakdown([Phases(1, 7, 2)] * 3, [Phases(1, 10, 2)] * 3, [Phases(1, 4, 2)] * 3)
    assert (found.forward_s, found.backward_s, found.exposed_s, found.optimizer_s) == (1, 4, 3, 2)
    assert (found.communication_s, found.hidden_s) == (6, 3)
    assert sum(found.shown().values()) == 1e3 * (1 + 7 + 2)


def test_every_nth_iteration_synchronises() -> None:
    assert [i for i in range(8) if synchronizes(i, 4)] == [3, 7]
    assert all(synchronizes(i, 1) for i in range(8))


def test_smoothing_begins_at_the_first_value() -> None:
    assert smoothed([4.0, 8.0, 8.0], weight=0.5) == [4.0, 6.0, 7.0]


def test_the_models_are_those_that_are_named() -> None:
    mlp, *_, tiny = all_cases(FULL)
    assert sum(parameter.nbytes for parameter in mlp.model().parameters()) == 6 * 4 * (1024 * 1024 + 1024)
    assert [parameter.numel() for parameter in tiny.model().parameters()] == [16] * 500
    for case in all_cases(QUICK):
        batch = case.batch()
        assert case.loss(case.model()(batch), batch).ndim == 0


class FakeBucket:
    def __init__(self, number: int, last: int) -> None:
        self.number = number
        self._last = last

    def is_last(self) -> bool:
        return self.number == self._last


def test_without_overlap_nothing_is_reduced_before_the_last_bucket() -> None:
    reduced: list[int] = []
    promises: list[torch.futures.Future[torch.Tensor]] = []

    def hook(_: None, bucket: FakeBucket) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.number)
        promises.append(torch.futures.Future())
        return promises[-1]

    deferral = Deferral(hook)
    for _ in range(2):  # a second backward begins anew
        reduced.clear()
        promises.clear()
        futures = []
        for number in range(3):
            assert reduced == []
            futures.append(deferred_hook(deferral, FakeBucket(number, 2)))
        assert reduced == [0, 1, 2]
        assert not any(future.done() for future in futures)
        for number, promise in enumerate(promises):
            promise.set_result(torch.tensor([number]))
        assert [future.value().item() for future in futures] == [0, 1, 2]


def test_what_fails_after_backward_fails_the_bucket() -> None:
    promise: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future = deferred_hook(Deferral(lambda _, bucket: promise), FakeBucket(0, 0))
    promise.set_exception(RuntimeError("no wire"))
    with pytest.raises(RuntimeError, match="no wire"):
        future.value()


def test_steps_are_told_kept_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "step.json"
    assert (
        step.main(["--quick", "--steps", "1", "--parts", "cases", "memory", "--json", str(kept), "--plot", str(tmp_path)]) == 0
    )
    figures = json.loads(kept.read_text())
    assert len(figures["cases"]["cases"]) == 8
    contenders = {"ours", "ours, views", "torch", "torch, views", "none"}
    assert all(case["steps"].keys() == contenders for case in figures["cases"]["cases"])
    assert "exposed communication, ours over torch's, geometric mean over 8 cases" in capsys.readouterr().out
    assert (tmp_path / "step-cases.png").read_bytes().startswith(PNG)


def test_every_part_of_the_papers_evaluation_is_told_kept_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="install syncline-ddp[examples]")
    kept = tmp_path / "paper.json"
    assert paper.main(["--quick", "--steps", "2", "--json", str(kept), "--plot", str(tmp_path)]) == 0
    figures = json.loads(kept.read_text())
    assert figures.keys() == {"environment", *paper.PARTS}
    for losses in figures["no_sync"]["loss"].values():
        assert {every: len(values) for every, values in losses.items()} == dict.fromkeys("1248", 20)
        assert losses["1"][0] == losses["8"][0]  # the same model and data,
        assert losses["1"][-1] != losses["8"][-1]  # trained otherwise
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert len(drawn) == 7


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--steps", "0"], "--steps: expected 1 or more, found 0"),
        (["--json", "/no such folder/x.json"], "--json: there is no folder /no such folder"),
        (["--parts", "weather"], "invalid choice: 'weather'"),
    ],
)
def test_what_cannot_be_done_is_said_before_measuring(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        step.main(words)
    assert complaint in capsys.readouterr().err


# ---- emulated hosts ----


def test_another_user_than_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated_hosts.shutil, "which", lambda program: f"/sbin/{program}")
    with pytest.raises(ToolError, match=r"need root.*this is user 1000. Run it with sudo"):
        emulated_hosts.check_possible(1000)


def test_a_missing_program_is_told_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated_hosts.shutil, "which", lambda program: None if program == "tc" else f"/sbin/{program}")
    with pytest.raises(ToolError, match=r"the program tc; .*apt install iproute2"):
        emulated_hosts.check_possible(0)


def test_what_a_killed_run_left_is_found_by_its_name() -> None:
    names = ["syncline-12-a", "syncline-12-b", "syncline-34-a", "syncline-12-ax", "other"]
    assert emulated_hosts.left_over(names, lambda pid: pid == 34) == ["syncline-12-a", "syncline-12-b"]


def test_two_hosts_send_the_minimum_and_leave_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "hosts.json"
    words = ("--quick", "--steps", "1", "--per-host", "1", "--parts", "collective", "--json", str(kept))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(
        (sys.executable, "-m", "benchmarks.hosts", *words), env=env, capture_output=True, text=True, timeout=100
    )
    if done.returncode == 2 and "bench hosts: " in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    figures = json.loads(kept.read_text())["1 per host"]
    assert figures["environment"]["nodes"] == 2
    for subject in ("mpi", "raw-mpi"):
        found = figures["collective"][subject]
        assert found["minimum_bytes"] <= found["sent_bytes"] < 1.5 * found["minimum_bytes"]
    assert "syncline-" not in subprocess.run(("ip", "netns", "list"), capture_output=True, text=True).stdout
