"""The order of gradients as tables: no tensor, no rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from syncline.reducer.arrival_order import ArrivalOrder


@pytest.mark.parametrize(
    ("arrivals", "learned"),
    [
        ([2, 1, 0], [2, 1, 0]),
        ([0, 2, 1], [0, 2, 1]),
        ([1], [1, 0, 2]),  # those without a gradient come last, ascending
        ([], [0, 1, 2]),
        ([2, 0, 2, 1], [0, 2, 1]),  # a parameter that is used twice is ready at its last gradient
        ([1, 1, 1, 0], [1, 0, 2]),
    ],
)
def test_parameters_stand_in_the_order_of_their_last_gradients(arrivals: Sequence[int], learned: Sequence[int]) -> None:
    order = ArrivalOrder(3)
    for index in arrivals:
        order.arrived(index)
    assert order.learned is None, "a backward that has not ended teaches nothing"
    order.learn()
    assert order.learned == learned


def test_arrivals_of_one_backward_do_not_count_in_the_next() -> None:
    order = ArrivalOrder(2)
    order.arrived(1)
    order.forget_arrivals()
    order.arrived(0)
    order.arrived(1)
    order.learn()
    assert order.learned == [0, 1]
