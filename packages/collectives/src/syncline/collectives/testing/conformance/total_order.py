"""Checks that all ranks run a group's collectives in the same order, including collectives that callbacks issue.

See Note [One total order] in `engine.queue`. Each collective gathers a label from all ranks. If the order differs, a collective
gathers different labels, or the ranks hang or report a disagreement.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from ...group import ProcessGroup
from ...work import Work
from .values import Check, CheckError, expect_equal

_ROUNDS = 25


class _LabelledCollectives:
    """Labelled collectives of one rank, and a log of the order in which they finished on this rank."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._results: dict[str, list[torch.Tensor]] = {}
        self._jitter = random.Random(97 * group.rank)
        self.log: list[str] = []

    def start(self, label: str, *, async_op: bool = True) -> Work:
        """Issue a collective, sometimes after a pause. The pauses differ between ranks."""
        if self._jitter.random() < 0.2:
            time.sleep(self._jitter.uniform(0.0, 0.002))
        self._results[label] = [torch.empty(1, dtype=torch.int64) for _ in range(self._group.size)]
        return self._group.all_gather(self._results[label], torch.tensor([_number(label)]), async_op=async_op)

    def run(self, label: str) -> None:
        self.start(label, async_op=False)
        self.log.append(label)

    def expect_in_order(self, expected: list[str]) -> None:
        """Check that each collective got one label from all ranks, and that `log` on this rank has the labels `expected`."""
        # On CUDA, each callback waited on its own stream. The callbacks' futures have no tensors, so the current stream does
        # not wait for these streams. After the barrier, all collectives have finished.
        self._group.barrier()
        for label, numbers in self._results.items():
            if {int(number) for number in numbers} != {_number(label)}:
                labels = {_number(known): known for known in self._results}
                found = [labels.get(int(number), "?") for number in numbers]
                raise CheckError(f"on {self._group.place()}, '{label}' met {found} of the ranks, by rank")
        expect_equal(self.log, expected, f"order of collectives on {self._group.place()}")


def _number(label: str) -> int:
    return int.from_bytes(label.encode(), "big")


def _wait_for_all(futures: list[torch.futures.Future[Any]]) -> None:
    for future in futures:
        future.wait()


def callbacks_that_wait(group: ProcessGroup) -> None:
    """Check a callback that issues a collective and waits for it.

    On every rank, the callback's collective must run before the main thread's next collective.
    """
    _callbacks_that_wait(_LabelledCollectives(group), lambda _collectives, _k: None)


def callbacks_while_the_main_thread_issues(group: ProcessGroup) -> None:
    """Check that the main thread and callbacks can issue collectives and wait for them at the same time."""
    _callbacks_that_wait(
        _LabelledCollectives(group), lambda collectives, k: collectives.start(f"C{k}", async_op=k % 2 == 0).wait()
    )


def _callbacks_that_wait(collectives: _LabelledCollectives, meanwhile: Callable[[_LabelledCollectives, int], object]) -> None:
    futures = []
    for k in range(_ROUNDS):

        def then(_: torch.futures.Future[Any], k: int = k) -> None:
            collectives.log.append(f"A{k}")
            collectives.run(f"B{k}")

        futures.append(collectives.start(f"A{k}").get_future().then(then))
        meanwhile(collectives, k)
    _wait_for_all(futures)
    collectives.expect_in_order([f"{letter}{k}" for k in range(_ROUNDS) for letter in "AB"])


def nested_callbacks(group: ProcessGroup) -> None:
    """Check callbacks within callbacks, two levels deep, which issue collectives and wait."""
    collectives = _LabelledCollectives(group)
    futures = []
    for k in range(_ROUNDS):

        def outer(_: torch.futures.Future[Any], k: int = k) -> None:
            collectives.log.append(f"A{k}")

            def inner(_: torch.futures.Future[Any]) -> None:
                collectives.log.append(f"B{k}")
                collectives.start(f"C{k}").get_future().then(lambda _: collectives.run(f"D{k}")).wait()

            collectives.start(f"B{k}").get_future().then(inner).wait()
            collectives.run(f"E{k}")

        futures.append(collectives.start(f"A{k}").get_future().then(outer))
        if k % 3 == 0:
            collectives.start(f"F{k}").wait()
    _wait_for_all(futures)
    collectives.expect_in_order([f"{letter}{k}" for k in range(_ROUNDS) for letter in "ABDE"])


def chains_that_do_not_wait(group: ProcessGroup) -> None:
    """Check callbacks that issue a collective and attach a callback to this collective, as in a PowerSGD hook."""
    collectives = _LabelledCollectives(group)
    last: list[torch.futures.Future[Any]] = []
    for k in range(_ROUNDS):

        def second(_: torch.futures.Future[Any], k: int = k) -> None:
            collectives.log.append(f"B{k}")

        def first(_: torch.futures.Future[Any], k: int = k, second: Any = second) -> None:
            collectives.log.append(f"A{k}")
            last.append(collectives.start(f"B{k}").get_future().then(second))

        collectives.start(f"A{k}").get_future().then(first)
    group.barrier()
    _wait_for_all(last)
    collectives.expect_in_order([f"{letter}{k}" for k in range(_ROUNDS) for letter in "AB"])


def callbacks_attached_late(group: ProcessGroup) -> None:
    """Check a callback that is attached when its collective has finished on one rank only."""
    collectives = _LabelledCollectives(group)
    for k in range(_ROUNDS):
        work = collectives.start(f"A{k}")
        if k % group.size == group.rank:
            work.wait()  # now the collective has finished on this rank, but maybe not on others

        def then(_: torch.futures.Future[Any], k: int = k) -> None:
            collectives.run(f"B{k}")

        future = work.get_future().then(then)
        collectives.start(f"C{k}").wait()
        future.wait()
    collectives.expect_in_order([f"B{k}" for k in range(_ROUNDS)])


def a_callback_waits_for_what_is_queued(group: ProcessGroup) -> None:
    """Check that a callback may wait for a collective that was issued after the callback's own collective."""
    collectives = _LabelledCollectives(group)
    for k in range(_ROUNDS):
        later: list[Work] = []
        futures = []

        def then(_: torch.futures.Future[Any], k: int = k, later: list[Work] = later) -> None:
            for work in later:
                work.wait()
            collectives.log.append(f"A{k}")

        futures.append(collectives.start(f"A{k}").get_future().then(then))
        later.append(collectives.start(f"B{k}"))
        later.append(collectives.start(f"C{k}"))
        later[-1].wait()
        _wait_for_all(futures)
    collectives.expect_in_order([f"A{k}" for k in range(_ROUNDS)])


CHECKS: dict[str, Check] = {
    "total_order_callbacks_that_wait": callbacks_that_wait,
    "total_order_callbacks_while_the_main_thread_issues": callbacks_while_the_main_thread_issues,
    "total_order_nested_callbacks": nested_callbacks,
    "total_order_chains_that_do_not_wait": chains_that_do_not_wait,
    "total_order_callbacks_attached_late": callbacks_attached_late,
    "total_order_a_callback_waits_for_what_is_queued": a_callback_waits_for_what_is_queued,
}
