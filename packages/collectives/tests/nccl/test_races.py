"""Streams are in order: each result comes after the collective, and each collective after what it reads was written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline.collectives import work
from syncline.collectives.testing import CHECKS
from syncline.collectives.testing.conformance import total_order
from syncline.collectives.transports.nccl.work import StreamWork
from test_support.fake_device import CPU
from test_support.races import RaceChecker

pytestmark = pytest.mark.ranks
IN_ORDER = [
    name for name in CHECKS if name.startswith(("total_order", "in_flight", "coalesced", "random", "reduce_scatter_of"))
]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_what_two_streams_use_needs_an_order(is_ordered: bool) -> None:
    checker = RaceChecker()
    with checker.watching():
        tensor, elsewhere = torch.ones(4), checker.device.stream(CPU, is_own=False)
        if is_ordered:
            elsewhere.wait_for(checker.device.now(CPU))
        with elsewhere.current():
            tensor.add_(1)
            done = elsewhere.record()
        if is_ordered:
            done.order_current_stream()
        assert tensor.sum().item() == 8.0
    assert len(checker.races) == (0 if is_ordered else 2)
    assert is_ordered or "aten::add_" in checker.races[0]


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The races of a check of the conformance suite."""
    checker = RaceChecker()
    monkeypatch.setattr(work, "new_future", lambda _: checker.device.future(CPU))  # a CPU's future would order no stream
    with checker.watching():
        CHECKS[name](checker.group)
    checker.group.close()
    return checker.races


@pytest.mark.parametrize("name", IN_ORDER)
def test_no_races(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(name, monkeypatch) == []


def test_a_result_that_is_read_without_an_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks that return no tensor order nobody who waits for their futures."""

    def read_at_once(collectives: Any, _: list[str]) -> None:
        for label, numbers in collectives._results.items():
            assert {int(number) for number in numbers} == {total_order._number(label)}

    monkeypatch.setattr(total_order._LabelledCollectives, "expect_in_order", read_at_once)
    races = run("total_order_callbacks_that_wait", monkeypatch)
    assert races
    assert "_local_scalar_dense" in races[0]


def test_a_wait_that_does_not_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = RaceChecker()
    monkeypatch.setattr(StreamWork, "_order_current_stream", lambda _: None)
    with checker.watching():
        tensor = torch.arange(6.0).view(2, 3).t()
        checker.group.all_reduce(tensor)
        assert tensor.sum().item() == 15.0
    assert checker.races
