"""Measuring on ranks as threads: the data is right, a wrong result is noticed, a refusal is noted."""

from __future__ import annotations

import importlib
import os
import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from syncline.collectives import InvalidArgumentError, ProcessGroup, TransportError
from syncline.collectives.cli.bench import KINDS, Buffers, Case, Measurement, Subject, command, measure
from syncline.collectives.cli.bench.subjects import Floor, GroupSubject, connect_subject
from syncline.collectives.transports.threads import create_groups

# The package offers the function of the same name.
measure_module = importlib.import_module("syncline.collectives.cli.bench.measure")


def on_ranks(size: int, body: Callable[[ProcessGroup], object]) -> list[object]:
    """What the body returned or raised on each rank."""
    groups = create_groups(size, timeout_s=20.0)
    results: list[object] = [None] * size

    def play(group: ProcessGroup) -> None:
        try:
            results[group.rank] = body(group)
        except Exception as error:  # noqa: BLE001 - judged by the test
            results[group.rank] = error

    threads = [threading.Thread(target=play, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for group in groups:
        group.close()
    return results


def test_rank_0_alone_needs_the_folder_of_the_figures(tmp_path: Path) -> None:
    def body(group: ProcessGroup) -> None:
        folder = tmp_path if (group.rank == 0) == has_it else tmp_path / "gone"
        command._check_outputs(Namespace(json=folder / "figures.json", plot=None), group)

    has_it = True
    assert on_ranks(2, body) == [None, None]
    has_it = False
    for error in on_ranks(2, body):
        assert isinstance(error, InvalidArgumentError)
        assert f"there is no folder {tmp_path / 'gone'}" in str(error)


@pytest.mark.parametrize("has_file", [True, False])
def test_a_file_that_this_user_may_not_write_is_refused_before_the_measurements(has_file: bool, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    if has_file:
        file.touch(0o400)
    tmp_path.chmod(0o500)
    user = os.getuid()
    if user == 0:  # root may write everywhere
        os.setresuid(65534, -1, -1)
    try:
        with pytest.raises(InvalidArgumentError, match=r"cannot write .*figures\.json: this user may not write there"):
            command._check_files(Namespace(json=file, plot=None))
    finally:
        if user == 0:
            os.setresuid(0, -1, -1)
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("collective", "size"), [(name, size) for name in KINDS for size in (1, 2, 3) if size >= KINDS[name].least_ranks]
)
def test_every_collective_on_every_rank(collective: str, size: int) -> None:
    """`measure` verifies the result, so that it returns at all is the test."""
    case = Case(collective, torch.bfloat16, 60)

    def body(group: ProcessGroup) -> list[Measurement]:
        return measure(case, [GroupSubject(group, owned=False)], group, budget_s=0.001)

    for result in on_ranks(size, body):
        assert isinstance(result, list), result
        (row,) = result
        assert (row.collective, row.dtype, row.backend, row.world_size) == (collective, "bfloat16", "in_process", size)
        assert len(row.samples_s) >= 5
        assert min(row.samples_s) > 0


@pytest.mark.parametrize("collective", [name for name in KINDS if name != "barrier"])
def test_a_collective_that_does_nothing_is_noticed(collective: str) -> None:
    class Lazy(Subject):
        name = "lazy"

        def prepare(self, collective: str, buffers: Buffers) -> Callable[[], object]:
            return lambda: None

        def close(self) -> None:
            pass

    results = on_ranks(2, lambda group: measure(Case(collective, torch.float32, 64), [Lazy()], group, 0.001))
    for result in results:
        assert isinstance(result, TransportError), result
        assert "lazy" in str(result)
        assert "wrong result on rank(s)" in str(result)


class Picky(Subject):
    """Refuses on one rank only, when asked to prepare or when called."""

    name = "picky"

    def __init__(self, rank: int, when: str) -> None:
        self._refuses = rank == 1
        self._when = when

    def prepare(self, collective: str, buffers: Buffers) -> Callable[[], object]:
        if self._when == "prepare":
            self._refuse()
        return self._refuse if self._when == "call" else lambda: None

    def close(self) -> None:
        pass

    def _refuse(self) -> None:
        if self._refuses:
            raise RuntimeError("not with me")


@pytest.mark.parametrize("when", ["prepare", "call"])
def test_a_refusal_by_one_rank_is_one_by_all(when: str) -> None:
    case = Case("barrier", torch.float32, 4)

    def body(group: ProcessGroup) -> list[Measurement]:
        return measure(case, [Picky(group.rank, when), GroupSubject(group, owned=False)], group, 0.001)

    for result in on_ranks(3, body):
        assert isinstance(result, list), result
        assert [(row.backend, row.note, bool(row.samples_s)) for row in result] == [
            ("picky", "rank 1: not with me", False),
            ("in_process", "", True),
        ]


def test_sums_of_what_a_late_refusal_left_do_not_grow() -> None:
    """Rank 1 refuses once the data are there; the others then repeat their sums a hundred times."""
    left: list[float] = []

    class Looking(GroupSubject):
        def prepare(self, collective: str, buffers: Buffers) -> Callable[[], object]:
            call = super().prepare(collective, buffers)

            def look() -> None:
                call()
                left.append(float(buffers.block.abs().max()))

            return look

    def body(group: ProcessGroup) -> list[Measurement]:
        subjects = [Looking(group, owned=False), Picky(group.rank, "call")]
        return measure(Case("all_reduce", torch.float32, 512), subjects, group, 0.001)

    assert all(isinstance(result, list) for result in on_ranks(2, body))
    assert left[0] > 0  # verified on data
    assert left[-1] == 0


def test_a_ring_needs_two_ranks() -> None:
    (result,) = on_ranks(
        1, lambda group: measure(Case("send_recv", torch.float32, 4), [GroupSubject(group, owned=False)], group)
    )
    assert isinstance(result, list), result
    assert [(row.samples_s, row.note) for row in result] == [((), "needs 2 ranks")]


def test_a_refusal_is_noted_and_the_others_are_measured() -> None:
    class Refusing(Subject):
        name = "refusing"

        def prepare(self, collective: str, buffers: Buffers) -> Callable[[], object]:
            raise NotImplementedError("no such thing")

        def close(self) -> None:
            pass

    case = Case("all_reduce", torch.float32, 64)
    results = on_ranks(2, lambda group: measure(case, [Refusing(), GroupSubject(group, owned=False)], group, 0.001))
    for result in results:
        assert isinstance(result, list), result
        assert [(row.backend, row.note, bool(row.samples_s)) for row in result] == [
            ("refusing", "no such thing", False),
            ("in_process", "", True),
        ]


@pytest.mark.parametrize(("size", "numel"), [(1, 4), (2, 8), (3, 10), (4, 2)])
def test_the_floor_adds_the_other_shares_and_copies_the_sum(size: int, numel: int) -> None:
    buffers = Buffers(0, size, numel, torch.float32)
    buffers.block.copy_(torch.arange(numel))
    buffers.output.copy_(100 * torch.arange(numel))
    share = numel // size
    shares = [buffers.block[:share].clone(), *(buffers.output[k * share : (k + 1) * share].clone() for k in range(1, size))]
    Floor().prepare("all_reduce", buffers)()
    total = torch.stack(shares).sum(dim=0)
    assert torch.equal(buffers.block[:share], total)
    for k in range(1, size):
        assert torch.equal(buffers.output[k * share : (k + 1) * share], total)
    assert torch.equal(buffers.block[share:], torch.arange(numel)[share:].float())


def test_the_floor_is_measured_though_it_communicates_nothing() -> None:
    def body(group: ProcessGroup) -> list[list[Measurement]]:
        return [measure(Case(name, torch.float32, 64), [Floor()], group, 0.001) for name in ("all_reduce", "broadcast")]

    for result in on_ranks(2, body):
        assert isinstance(result, list), result
        (all_reduce,), (broadcast,) = result
        assert len(all_reduce.samples_s) >= 5
        assert (broadcast.samples_s, broadcast.note) == ((), "it is that of all_reduce")


def test_on_a_gpu_the_clock_stops_when_all_is_done_there(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(f"synchronize {device}"))
    (group,) = create_groups(1, timeout_s=20.0)
    measure_module._sample(lambda: log.append("call"), 2, group, torch.device("cuda", 3))
    group.close()
    assert log == ["call", "synchronize cuda:3", "call", "call", "synchronize cuda:3"]


@pytest.mark.parametrize("name", ["torch-gloo-in-window", "raw-mpi-in-window", "floor-in-window"])
def test_a_baseline_is_not_measured_in_a_window(name: str) -> None:
    (group,) = create_groups(1, timeout_s=20.0)
    with pytest.raises(InvalidArgumentError, match=f"'{name}' cannot be measured: .* plain memory"):
        connect_subject(name, group)
    group.close()


def test_an_unknown_subject_is_told_the_known_ones() -> None:
    (group,) = create_groups(1, timeout_s=20.0)
    with pytest.raises(InvalidArgumentError, match=r"unknown backend 'mpy' .*mpi.*raw-mpi, torch-gloo, floor"):
        connect_subject("mpy", group)
    group.close()


def test_the_slowest_rank_counts() -> None:
    class Uneven(Subject):
        """Rank 1 takes its time; the barrier around each sample makes no difference to rank 0's own clock."""

        name = "uneven"

        def __init__(self, rank: int) -> None:
            self._rank = rank

        def prepare(self, collective: str, buffers: Buffers) -> Callable[[], object]:
            pause = threading.Event()
            return lambda: pause.wait(0.02 if self._rank == 1 else 0.0)

        def close(self) -> None:
            pass

    results = on_ranks(2, lambda group: measure(Case("barrier", torch.float32, 4), [Uneven(group.rank)], group, 0.001))
    assert isinstance(results[0], list)
    assert min(results[0][0].samples_s) >= 0.019
    assert results[0] == results[1]
