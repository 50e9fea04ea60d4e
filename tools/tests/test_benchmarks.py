"""The benchmarks: tables of their arithmetic, and each run at a tiny size, for its form and not for its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mpi_runtimes
from benchmarks import (
    collectives,
    convergence,
    elastic,
    emulated_hosts,
    hosts_job,
    nccl,
    overhead,
    recording,
    sleeping_steps,
    step,
    torch_backend,
    tuned_buckets,
)
from benchmarks.cases import FULL, QUICK, all_cases, many_tiny, mlp, with_unused
from benchmarks.deferral import Deferral, deferred_hook
from benchmarks.exposure import Compared
from benchmarks.memory import can_be_measured, kib_in, peak_bytes
from benchmarks.other_load import ProcessorTimes, computed_ticks, cores_of_others, idle_ticks
from benchmarks.report import Report
from benchmarks.sleeping_steps import bits_per_s, forced_exposure_s
from benchmarks.summary import GeometricMean, Summary, ratio_of_costs
from benchmarks.targets import (
    BUCKETED,
    EXPOSED,
    MEMORY,
    POWER_SGD_FASTER,
    SHARED_HOSTS_OVER_RAW,
    STEP,
    TUNED_OVER_BEST,
    TUNED_OVER_DEFAULT,
    WIRE,
    Target,
)
from benchmarks.timing import Phases, interleaved, order_of_round, slowest
from benchmarks.wire import minimum_bytes, sent_bytes
from commands import TOOLS_ON_PATH, ToolError
from syncline.collectives import ProcessGroup
from syncline.collectives.cli.bench import Buffers, Measurement
from syncline.collectives.cli.bench import Case as CollectiveCase
from syncline.collectives.cli.bench.kinds import Allocate
from syncline.collectives.cli.bench.subjects import Floor
from syncline.collectives.testing import run_ranks
from test_support import full_run
from test_support.jobs import LIMIT_S

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("samples", "quartiles"),
    [([3.0], (3.0, 3.0, 3.0)), ([4.0, 1.0, 3.0, 2.0, 5.0], (2.0, 3.0, 4.0)), ([1.0, 2.0], (1.25, 1.5, 1.75))],
)
def test_a_summary_is_the_quartiles(samples: list[float], quartiles: tuple[float, ...]) -> None:
    assert Summary.of(samples) == Summary(*quartiles, len(samples))


def test_a_difference_is_of_the_same_round() -> None:
    """The machine was ten times slower in the second round."""
    assert Summary.of_difference([3.0, 30.0, 3.0], [1.0, 28.0, 1.0]) == Summary(2.0, 2.0, 2.0, 3)


NOISE = Summary(-20.0, 2.0, 20.0, 100)


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio"),
    [
        (Summary(1, 2, 3, 100), Summary(3, 4, 5, 100), 0.5),
        (Summary(-1, 2, 5, 100), Summary(3, 4, 5, 100), 0.5),  # steps differ much, and many of them tell the median
        (NOISE, Summary(3, 4, 5, 100), None),
        (Summary(1, 2, 3, 100), NOISE, None),
        (Summary(1, 2, 3, 1), Summary(3, 4, 5, 100), None),
        (Summary(-3, -2, -1, 100), Summary(3, 4, 5, 100), None),
        (Summary(1, 2, 3, 100), Summary(-3, -2, -1, 100), None),
    ],
)
def test_costs_that_are_lost_in_noise_have_no_ratio(ours: Summary, theirs: Summary, ratio: float | None) -> None:
    assert ratio_of_costs(ours, theirs) == ratio


@pytest.mark.parametrize(
    ("ratios", "mean", "basis"),
    [
        ({}, None, "over 0 of 0 cases"),
        ({"a": None}, None, "over 0 of 1 cases, lost in noise: a"),
        ({"a": 2.0, "b": 8.0}, 4.0, "over 2 of 2 cases"),
        ({"a": 2.0, "b": None, "c": 8.0, "d": None}, 4.0, "over 2 of 4 cases, lost in noise: b; d"),
    ],
)
def test_a_geometric_mean_names_what_it_leaves_out(ratios: dict[str, float | None], mean: float | None, basis: str) -> None:
    found = GeometricMean.of(ratios)
    assert found.value == (None if mean is None else pytest.approx(mean))
    assert found.basis() == basis


def test_views_are_compared_with_views() -> None:
    taken = {"ours": [4.0], "ours, views": [3.0], "torch": [8.0], "torch, views": [5.0], "none": [1.0]}
    found = Compared.of(taken)
    assert (found.step_ratio("ours"), found.step_ratio("ours, views")) == (4 / 8, 3 / 5)
    assert (found.exposed_ratio("ours"), found.exposed_ratio("ours, views")) == (3 / 7, 2 / 4)
    assert found.exposed_ratio("none") is None
    assert found.figures()["step_ratio"]["torch, views"] == 1.0


# ---- targets ----

AT_MOST = Target("time: over theirs", 0.5)
AT_LEAST = Target("all-reduce: faster", 8, is_least=True)


@pytest.mark.parametrize(
    ("target", "seen", "where", "verdict"),
    [
        (AT_MOST, 0.5, "", "target: time: over theirs: wanted at most 0.5 times, seen 0.5: held"),
        (AT_MOST, 0.501, "MLP", "target: time: over theirs: wanted at most 0.5 times, seen 0.501 (MLP): missed"),
        (AT_LEAST, 8.0, "", "target: all-reduce: faster: wanted at least 8 times, seen 8: held"),
        (AT_LEAST, 7.99, "4M", "target: all-reduce: faster: wanted at least 8 times, seen 7.99 (4M): missed"),
        (AT_LEAST, None, "noise", "target: all-reduce: faster: wanted at least 8 times, not seen (noise)"),
    ],
)
def test_verdicts(target: Target, seen: float | None, where: str, verdict: str) -> None:
    assert target.verdict(seen, where) == verdict


def test_the_worst_case_is_judged() -> None:
    seen = [(0.3, "a"), (0.6, "b"), (0.2, "c")]
    assert AT_MOST.worst(seen) == (0.6, "b")
    assert AT_LEAST.worst(seen) == (0.2, "c")
    assert AT_LEAST.worst([]) == (None, "")


def measured(backend: str, size_bytes: int, median_us: float) -> Measurement:
    return Measurement("all_reduce", "float32", size_bytes, 2, backend, (1e-6 * median_us,))


def test_what_collectives_are_judged_by() -> None:
    rows = [
        *(measured("mpi-in-window", size, 10.0) for size in (4 << 20, 25 << 20, 64 << 20)),
        *(measured("raw-mpi", size, us) for size, us in ((4 << 20, 30.0), (25 << 20, 24.0), (64 << 20, 90.0))),
        measured("torch-gloo", 25 << 20, 80.0),
        measured("floor", 25 << 20, 5.0),
        *(measured("mpi", size, 20.0) for size in (4, 16 << 10, 64 << 10)),
        *(measured("raw-mpi", size, us) for size, us in ((4, 12.0), (16 << 10, 9.0), (64 << 10, 1.0))),
        Measurement("all_reduce", "float32", 4, 2, "torch-gloo", note="refused"),
        Measurement("broadcast", "float32", 25 << 20, 2, "floor", (1.0,)),
        Measurement("all_reduce", "bfloat16", 25 << 20, 2, "torch-gloo", (1e-6,)),
    ]
    assert [line.partition(": wanted ")[2] for line in collectives.verdicts(rows)] == [
        "at least 8 times, seen 8 (mpi-in-window, 25M): held",
        "at least 2.5 times, seen 2.4 (mpi-in-window, 25M): missed",
        "at most 1.3 times, seen 2 (mpi-in-window, 25M): missed",
        "at most 10 us, seen 11 (mpi, 16K): missed",
    ]
    assert collectives.verdicts(rows[:3]) == []


class Options:
    """The options of a report."""

    plot = None

    def __init__(self, json: Path, quick: bool) -> None:
        self.json = json
        self.quick = quick


@pytest.mark.parametrize(
    ("ranks", "quick", "caveat"),
    [(1, False, ""), (1, True, "; with --quick that means nothing"), (2, False, "; but ranks share cores")],
)
def test_verdicts_are_told_and_kept_with_what_they_lack(
    ranks: int, quick: bool, caveat: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    path = tmp_path / "kept.json"

    def body(group: ProcessGroup) -> None:
        report: Any = Report("test", Options(path, quick), group)  # type: ignore[arg-type]
        report.judge_worst(STEP, [(0.5, "a"), (0.9, "b")])
        report.judge(EXPOSED, None, "noise")
        report.keep("part", {})

    run_ranks(ranks, body)
    kept = json.loads(path.read_text())["verdicts"]
    assert [line.partition(": wanted ")[2] for line in kept] == [
        f"at most 1 times, seen 0.9 (b): held{caveat}",
        f"at most 0.4 times, not seen (noise){caveat}",
    ]
    assert capsys.readouterr().out.splitlines()[1:] == kept


@pytest.mark.parametrize(("hosts", "share"), [(1, 0.0), (2, 1.0), (3, 4 / 3), (4, 1.5)])
def test_the_least_that_a_host_sends(hosts: int, share: float) -> None:
    assert minimum_bytes(300, hosts) == pytest.approx(300 * share)


def test_what_the_bandwidth_forces_to_show() -> None:
    """16 layers of 3 s on the wire: all but 15 of backward's 1 s; or the last one."""
    assert forced_exposure_s(16, 1.0, 3.0) == 48.0 - 15.0
    assert forced_exposure_s(16, 5.0, 3.0) == 3.0


@pytest.mark.parametrize(("rate", "expected"), [("1gbit", 1e9), ("200mbit", 2e8), ("1.5kbit", 1500.0)])
def test_rates_as_tc_has_them(rate: str, expected: float) -> None:
    assert bits_per_s(rate) == expected


COUNTERS = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     1       2    3    4    5     6          7         8        9      10   11   12   13    14      15         16
 wire0:17 18 0 0 0 0 0 0 4200 19 0 0 0 0 0 0
"""


def test_what_a_device_has_sent_is_in_its_own_line() -> None:
    assert (sent_bytes(COUNTERS, "wire0"), sent_bytes(COUNTERS, "lo")) == (4200, 9)
    with pytest.raises(ValueError, match="no device 'wire'"):
        sent_bytes(COUNTERS, "wire")


@pytest.mark.skipif(not can_be_measured(), reason="needs Linux with glibc")
def test_the_peak_of_memory_is_what_a_contender_takes() -> None:
    def make(mebibytes: int) -> Callable[[], Callable[[], Phases]]:
        def made() -> Callable[[], Phases]:
            kept = torch.ones(mebibytes << 18)

            def one_step() -> Phases:
                torch.ones(8 << 18).add_(kept[0])  # freed again, but was there
                return Phases.undivided(0.0)

            return one_step

        return made

    peaks = [peak_bytes(make(mebibytes)) / 2**20 for mebibytes in (32, 64, 32)]
    for peak, expected in zip(peaks, (40, 72, 40), strict=True):
        assert expected - 2 < peak < expected + 6


def test_memory_is_read_by_its_whole_name() -> None:
    assert kib_in("Pss:    7 kB\nPss_Shmem:\t   12 kB\n", "Pss_Shmem") == 12
    with pytest.raises(ValueError, match="no VmHWM"):
        kib_in("XVmHWM: 1 kB\n", "VmHWM")


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
    first = [Phases(1, 1, 1), Phases(5, 0, 0)]
    second = [Phases(0, 0, 4), Phases(1, 1, 1)]
    assert slowest([first, second]) == [Phases(0, 0, 4), Phases(5, 0, 0)]


@pytest.mark.parametrize("names", ["abcde", "a", ""])
def test_every_round_plays_all_in_an_order_of_its_own(names: str) -> None:
    rounds = [order_of_round(number, names) for number in range(200)]
    assert rounds == [order_of_round(number, names) for number in range(200)]
    assert all(sorted(names) == sorted(one) for one in rounds)
    for place in range(len(names)):  # no contender keeps to a place, and none follows another more often than the others do
        counts = [sum(one[place] == name for one in rounds) for name in names]
        assert min(counts) > 0.6 * 200 / len(names)


def test_two_steps_a_round_of_which_the_second_counts() -> None:
    """On three ranks; a step is as long as its place in this rank's log says, on rank 2 the most."""

    def body(group: ProcessGroup) -> tuple[list[str], dict[str, list[Phases]]]:
        log: list[str] = []

        def step_of(name: str) -> Callable[[], Phases]:
            def one_step() -> Phases:
                log.append(name)
                return Phases(group.rank, len(log), 0)

            return one_step

        return log, interleaved({name: step_of(name) for name in "abc"}, group, rounds=4, warm_up=2)

    played = run_ranks(3, body)
    log, taken = played[0]
    assert played == [(log, taken)] * 3
    orders = [order_of_round(number, "abc") for number in range(6)]
    assert len({tuple(order) for order in orders}) > 1
    assert log == [name for order in orders for name in order for _ in range(2)]
    for name in "abc":
        places = [place for place, logged in enumerate(log, start=1) if logged == name]
        assert taken[name] == [Phases(2, place, 0) for place in places[1::2][2:]]


def test_the_models_are_those_that_are_named() -> None:
    first, *_, tiny = all_cases(FULL)
    assert sum(parameter.nbytes for parameter in first.model().parameters()) == 6 * 4 * (1024 * 1024 + 1024)
    assert [parameter.numel() for parameter in tiny.model().parameters()] == [16] * 500
    for case in all_cases(QUICK):
        batch = case.batch()
        assert case.loss(case.model()(batch), batch).ndim == 0


def test_many_layers_neither_vanish_nor_explode() -> None:
    torch.manual_seed(0)
    case = many_tiny(FULL)
    model, batch = case.model(), case.batch()
    output = model(batch)
    assert 0.1 < output.abs().max() < 100
    case.loss(output, batch).backward()
    assert all(1e-6 < parameter.grad.abs().max() < 1 for parameter in model.parameters() if parameter.grad is not None)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_unused_parameters_are_not_reached_and_all_others_are() -> None:
    case = with_unused(mlp(2, QUICK))
    model, batch = case.model(), case.batch()
    case.loss(model(batch), batch).backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {"unused.weight", "unused.bias"}


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


# ---- played in small ----

TWO_RANKS = """
import sys
from pathlib import Path

from benchmarks import hooks, hosts_job, step

folder, steps, chosen = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
hosts_job.DEVICE = "lo"  # there is no wire here
for name, main, words in (
    ("step", step.main, ["--parts", *steps]),
    ("hooks", hooks.main, ["--parts", "mlp"]),
    ("hosts", hosts_job.main, ["--parts", "hooks", "buckets", "overlap", "sleeping"]),
):
    outputs = ["--json", str(folder / f"{name}.json"), "--plot", str(folder)]
    assert name not in chosen or main(["--quick", "--steps", "1", *outputs, *words]) == 0
"""
# Benchmarks over many models, or with a dozen pictures, take a minute; their parts have tests of their own.
PLAYED = ["step", "hooks", "hosts"]
# On a busy machine they take five times as long, so their limit, which is only for hangs, is longer than that of other tests.
PLAY_LIMIT_S = 300
takes_long = pytest.mark.timeout(PLAY_LIMIT_S + 30)
STEPS = [*step.PARTS] if full_run.FULL else ["cases", "buckets", "record"]
in_full = pytest.mark.skipif(not full_run.FULL, reason="takes long: dev.py test --full, or SYNCLINE_TEST_FULL=1")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **TOOLS_ON_PATH, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the output, figures and pictures of two ranks."""
    folder = tmp_path_factory.mktemp("played")
    runtime = mpi_runtimes.find("mpich")
    words = (*runtime.command(2), sys.executable, "-c", TWO_RANKS, folder, ",".join(STEPS), *PLAYED)
    done = subprocess.run(words, env=environment(**runtime.env), capture_output=True, text=True, timeout=PLAY_LIMIT_S)
    assert done.returncode == 0, done.stderr
    (folder / "told").write_text(done.stdout)
    return folder


def kept_by(name: str, folder: Path) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def drawn_by(name: str, folder: Path) -> set[str]:
    pictures = list(folder.glob(f"{name}-*.png"))
    assert all(path.read_bytes().startswith(PNG) for path in pictures)
    return {path.stem.removeprefix(f"{name}-") for path in pictures}


@takes_long
def test_steps_are_told_kept_and_drawn(played: Path) -> None:
    kept = kept_by("step", played)
    assert kept.keys() == {"environment", "verdicts", *STEPS}
    assert kept["environment"]["world_size"] == 2
    contenders = {"ours", "ours, views", "torch", "torch, views", "none"}
    compared = {"cases", "unused"} & set(STEPS)
    for part in compared:
        assert len(kept[part]["cases"]) == 8
        assert all(case["steps"].keys() == contenders for case in kept[part]["cases"].values())
        assert kept[part]["exposed_ratio"]["ours"]["cases"] == 8
    assert kept["buckets"]["steps"]["ours"].keys() >= {"one each", "25", "all in one"}
    for found in kept["record"].values():
        assert found["steps"].keys() == {"not recorded", "not recorded, again", "recorded"}
        assert found["buckets"] >= 1
    judged = [sum(target.what in line for line in kept["verdicts"]) for target in (STEP, EXPOSED, MEMORY)]
    assert judged == [2 * len(compared), 2 * len(compared), 2 if "memory" in STEPS and can_be_measured() else 0]
    assert all(line in (played / "told").read_text() for line in kept["verdicts"])
    assert drawn_by("step", played) == {"buckets", *compared}


def test_recording_adds_few_calls_to_a_step_whatever_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps are written to the file once a second. On a busy machine, a second may end before the step that is counted.
    monkeypatch.setattr("syncline.ddp.tracing.recorder._WRITE_EVERY_S", 3600.0)
    added = {buckets: recording.measure_added(buckets, blocks=2).calls for buckets in (1, 3)}
    assert 0 < added[1] < added[3] < 120


def test_what_other_programs_took_is_the_machines_time_without_ones_own() -> None:
    # Of 10 seconds on two cores, 13 seconds of computing, 9 of them in processes that were started here.
    assert cores_of_others(ProcessorTimes(5.0, 100.0, 1.0), ProcessorTimes(15.0, 113.0, 10.0)) == pytest.approx(0.4)
    assert cores_of_others(ProcessorTimes(5.0, 100.0, 1.0), ProcessorTimes(15.0, 101.0, 3.0)) == 0.0
    assert computed_ticks("cpu  10 2 30 400 50 6 70 8\ncpu0 1 1 1 1") == 42
    assert idle_ticks("cpu  10 2 30 400 50 6 70 8\ncpu0 1 1 1 1") == 450


@in_full
def test_tuned_buckets_are_told_and_kept(tmp_path: Path) -> None:
    runtime = mpi_runtimes.find("mpich")
    words = ("-m", "benchmarks.tune", "--quick", "--steps", "1", "--cases", "mlp", "--json", tmp_path / "tune.json")
    command = (*runtime.command(2), sys.executable, *words)
    done = subprocess.run(command, env=environment(**runtime.env), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    kept, told = kept_by("tune", tmp_path), done.stdout
    assert kept.keys() == {"environment", "verdicts", "mpi", "gloo"}
    for part in ("mpi", "gloo"):
        (found,) = kept[part].values()
        assert found["chosen_mb"] == [1.0, 25.0]  # tiny models have one bucket, with any size
        assert found["steps_s"].keys() == {"auto", "default, again", "0.5", "1", "4", "8", "default", "100"}
        assert found["over_best"]["count"] == 1
    assert "auto chose 25 MiB, the first 1" in told
    assert [sum(target.what in line for line in kept["verdicts"]) for target in (TUNED_OVER_BEST, TUNED_OVER_DEFAULT)] == [2, 2]


def test_the_best_size_is_judged_in_other_rounds_than_those_that_chose_it() -> None:
    equal = dict.fromkeys(tuned_buckets.CAPS_MB, [2.0] * 4)
    found = tuned_buckets.Tuned([1.0, 8.0], {**equal, "8": [1.0, 3.0, 1.0, 5.0], "auto": [9.0, 6.0, 9.0, 5.0]})
    assert found.best == "8"
    assert found.over_best() == Summary(1.25, 1.5, 1.75, 2)
    assert found.over("auto", "default").median_s == 3.75


@takes_long
def test_hooks_are_told_kept_and_drawn(played: Path) -> None:
    kept = kept_by("hooks", played)["mlp"]["hooks"]
    assert len(kept) == 8
    assert all(pair.keys() == {"ours", "torch"} for pair in kept.values())
    assert "PowerSGD rank 4, same shapes batched" in (played / "told").read_text()
    assert drawn_by("hooks", played) == {"mlp"}


@takes_long
def test_what_the_hosts_run_is_told_kept_and_drawn(played: Path) -> None:
    kept = kept_by("hosts", played)
    assert [found.keys() for found in kept["buckets"].values()] == [{"ours", "torch", "none"}] * 3
    assert kept["sleeping"].keys() == set(sleeping_steps.PACES)
    assert kept["hooks"]["steps"].keys() == {"ours", "flat MPI", *hosts_job.HOOKS, "torch", "none"}
    judged = [sum(target.what in line for line in kept["verdicts"]) for target in (POWER_SGD_FASTER, BUCKETED)]
    assert judged == [1, 1]
    assert all("ours, after backward" in found for found in kept["overlap"].values())
    assert drawn_by("hosts", played) == {"hooks", "buckets-0", "buckets-1", "buckets-2", "overlap"}


def test_the_reducers_cost_is_above_the_bare_modules_in_the_same_round() -> None:
    taken_s = {"ours": [5.0, 14.0], "torch": [7.0, 16.0], "none": [1.0, 10.0]}
    found = overhead.costs(taken_s, count=2)
    assert found == {"ours": Summary(2, 2, 2, 2), "torch": Summary(3, 3, 3, 2)}
    assert overhead.ratio_to_torchs(found, "ours") == 2 / 3


@in_full
def test_the_reducers_cost_is_told_kept_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "overhead.json"
    assert overhead.main(["--quick", "--steps", "1", "--json", str(kept), "--plot", str(tmp_path)]) == 0
    figures = json.loads(kept.read_text())
    assert figures.keys() == {"environment", "verdicts", "realistic", "dynamic", "static", "find-unused"}
    contenders = {"ours", "ours, views", "torch", "torch, views"}
    for graph in overhead.GRAPHS:
        assert {clock: found.keys() for clock, found in figures[graph].items()} == dict.fromkeys(overhead.CLOCKS, contenders)
    real = " time added per parameter, real models, one rank, geometric mean"
    assert [line.partition(":")[2].partition(":")[0] for line in figures["verdicts"]] == [
        *[real] * 2,
        *(f" reducer's cost per parameter, {graph}" for graph in overhead.GRAPHS),
    ]
    assert all(line in capsys.readouterr().out for line in figures["verdicts"][:1])
    assert drawn_by("overhead", tmp_path) == {"dynamic", "static", "find-unused"}


@in_full
def test_what_elastic_costs_is_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "elastic.json"
    assert elastic.main(["--quick", "--rounds", "2", "--json", str(kept)]) == 0
    found = json.loads(kept.read_text())
    told = capsys.readouterr().out
    assert len(found) == 3
    for case, taken in found.items():
        parts = taken.pop("parts")
        assert {name: len(seconds) for name, seconds in parts.items()} == {"agreement": 2, "snapshot": 2}
        counts = {name: (len(those["wall_s"]), len(those["cpu_s"])) for name, those in taken.items()}
        assert counts == {"plain": (2, 2), "again": (2, 2), "elastic": (2, 2)}
        assert case in told


# ---- those that are run by hand ----


def test_time_that_two_kinds_of_kernels_share() -> None:
    assert nccl.common([(0, 2), (4, 8)], [(1, 3), (2, 5), (7, 7.5)]) == 1 + 1 + 0.5
    assert nccl.common([(0, 2)], []) == 0


def test_nccls_rounds_are_shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def elapsed_time(self, _: Event) -> float:
            return float(len(log))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    taken = nccl.timed({name: lambda name=name: log.append(name) for name in "abc"}, rounds=20)
    assert {name: len(values) for name, values in taken.items()} == dict.fromkeys("abc", 20)
    assert {log[start] for start in range(0, len(log), 3)} == set("abc")


def test_what_torchs_functions_add() -> None:
    names = ("ours", "ours, as torch's", "torch.distributed", "ours, waited for", "torch.distributed, waited for")
    taken = {name: [base, base + 1.0, base + 2.0] for base, name in enumerate(names)}
    found = torch_backend.row(4, taken)
    assert (found["added_us"], found["added_waited_for_us"]) == (2.0, 1.0)


def test_what_compression_loses() -> None:
    plain = [convergence.Training(97.0, 1000), convergence.Training(99.0, 1000)]
    compressed = [convergence.Training(95.0, 100), convergence.Training(98.0, 100)]
    found = convergence.summary("one bit", compressed, plain)
    assert (found["points_lost"], found["ratio"], found["lowest_percent"], found["highest_percent"]) == (1.5, 10, 95, 98)


# ---- options ----


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
    names = ["syncline-12-a", "syncline-12-h", "syncline-12-switch", "syncline-34-a", "syncline-12-ax", "other"]
    assert emulated_hosts.left_over(names, lambda pid: pid == 34) == ["syncline-12-a", "syncline-12-h", "syncline-12-switch"]


@pytest.mark.parametrize("count", [1, 9])
def test_too_few_or_too_many_hosts_are_refused(count: int) -> None:
    with pytest.raises(emulated_hosts.ToolError, match=f"expected 2 to 8 emulated hosts, found {count}"):
        emulated_hosts.EmulatedHosts(count=count)


def test_bytes_are_counted_in_the_subjects_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []

    class Windowed(Floor):
        def allocate(self) -> Allocate:
            return lambda numel, dtype, device: (log.append(("allocate", numel)), torch.empty(numel, dtype=dtype))[1]

        def prepare(self, collective: str, buffers: Buffers) -> Callable[[], object]:
            return lambda: log.append(collective)

    monkeypatch.setattr(hosts_job, "measure_sent", lambda call, *_: call())
    run_ranks(1, lambda group: hosts_job._sent_by(Windowed(), CollectiveCase("all_reduce", torch.float32, 64), group))
    assert log == [("allocate", 16), "all_reduce", "all_reduce"]  # the first is not counted


def test_two_hosts_send_the_minimum_and_leave_nothing(tmp_path: Path) -> None:
    """Two ranks on each; the collective is large enough for the window."""
    try:
        emulated_hosts.check_possible(os.geteuid())
    except ToolError as error:
        pytest.skip(str(error))
    words = ("--quick", "--steps", "1", "--per-host", "2", "--parts", "collective", "halves", "--plot", tmp_path)
    with subprocess.Popen(
        (sys.executable, "-m", "benchmarks.hosts", *words, "--json", tmp_path / "hosts.json"),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    if process.returncode == 2 and "` was refused: " in said:
        pytest.skip(said.strip())
    assert process.returncode == 0, said
    kept = kept_by("hosts", tmp_path)["2 per host"]
    assert kept["environment"]["nodes"] == 2
    assert kept["collective"].keys() == {"mpi-in-window", "mpi", "raw-mpi", "torch-gloo"}
    for subject in ("mpi-in-window", "mpi"):
        found = kept["collective"][subject]
        assert found["minimum_bytes"] <= found["sent_bytes"] <= 1.05 * found["minimum_bytes"]
    halves = kept["halves"]["bf16 between hosts"]
    assert halves["minimum_bytes"] == 2**17 <= halves["sent_bytes"] <= 1.1 * 2**17
    assert kept["halves"]["float32"]["sent_bytes"] >= 2**18
    assert [sum(target.what in line for line in kept["verdicts"]) for target in (WIRE, SHARED_HOSTS_OVER_RAW)] == [2, 1]
    assert drawn_by("hosts", tmp_path / "2-per-host") == {"collective"}
    # Its own namespaces: other runs may have theirs at the same time.
    assert f"syncline-{process.pid}-" not in subprocess.run(("ip", "netns", "list"), capture_output=True, text=True).stdout
