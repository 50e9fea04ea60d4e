"""Measuring on ranks as threads: the data is right, a wrong result is noticed, a refusal is noted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from syncline.collectives import ProcessGroup, TransportError
from syncline.collectives.backends.in_process import create_groups
from syncline.collectives.bench import KINDS, Buffers, Case, Measurement, Subject, measure
from syncline.collectives.bench.subjects import GroupSubject


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


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("collective", KINDS)
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
