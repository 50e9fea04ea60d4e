"""Checks of work and futures, with several collectives in flight."""

from __future__ import annotations

from datetime import timedelta

import torch

from ...group import ProcessGroup
from ...reduce_op import ReduceOp
from ...work import Work
from .values import Check, CheckError, expect, expect_equal, expect_raises, sum_of_terms, terms, values


def waited_for_backwards(group: ProcessGroup) -> None:
    """Check sixteen collectives of different sizes in flight together. The check waits for them in reverse order."""
    tensors = [terms((1 + 997 * number,), group.rank) + number for number in range(16)]
    works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number in reversed(range(16)):
        expect_equal(works[number].wait(), True, "wait()")
        expected = sum_of_terms((1 + 997 * number,), group.size) + number * group.size
        expect(tensors[number], expected, f"number {number} of 16 in flight")
    for work in works:
        expect_equal((work.is_completed(), work.exception()), (True, None), "is_completed() and exception()")


def of_all_kinds(group: ProcessGroup) -> None:
    """Check different collectives that are in flight together, followed by a blocking collective."""
    root = group.size - 1
    summed, copied, flagged = (
        terms((5001,), group.rank),
        values((77,), group.rank),
        torch.tensor([group.rank == root, group.rank == 0]),
    )
    gathered = [torch.empty(9) for _ in range(group.size)]
    works = [
        group.all_reduce(summed, async_op=True),
        group.broadcast(copied, root, async_op=True),
        group.all_gather(gathered, values((9,), group.rank), async_op=True),
        group.barrier(async_op=True),
    ]
    group.all_reduce(flagged, ReduceOp.MAX)
    expect(flagged, torch.tensor([True, True]), "all_reduce that is waited for at once")
    for work in works:
        work.wait(timedelta(seconds=30))
    expect(summed, sum_of_terms((5001,), group.size), "all_reduce in flight")
    expect(copied, values((77,), root), "broadcast in flight")
    for rank, output in enumerate(gathered):
        expect(output, values((9,), rank), f"all_gather in flight, output {rank}")


def futures(group: ProcessGroup) -> None:
    """Check that a future's value is the list of outputs, and that callbacks can be chained as in torch, even after `wait`."""
    for async_op in (False, True):
        tensor = terms((11,), group.rank)
        work = group.all_reduce(tensor, async_op=async_op)
        halved = work.get_future().then(lambda done: done.value()[0] / 2).then(lambda done: done.value() + 1)
        expected = sum_of_terms((11,), group.size)
        expect(halved.wait(), expected / 2 + 1, "value of the chained future")
        work.wait()
        late = work.get_future().then(lambda done: done.value())
        outputs = late.wait()
        if len(outputs) != 1 or outputs[0] is not tensor or work.result()[0] is not tensor:
            raise CheckError("expected the future and result() to give the tensor that was handed in")
        expect(tensor, expected, "tensor behind the future")
    gathered = [torch.empty(2) for _ in range(group.size)]
    gathering = group.all_gather(gathered, values((2,), group.rank), async_op=True)
    found = gathering.get_future().wait()
    expect_equal([output is mine for output, mine in zip(found, gathered, strict=True)], [True] * group.size, "outputs")


def no_truth_value(group: ProcessGroup) -> None:
    """Check that `if work:` raises, because a work is neither true nor false."""
    for work in (group.barrier(), group.barrier(async_op=True)):
        if not isinstance(work, Work):
            raise CheckError(f"expected a Work, found {type(work).__name__}")
        expect_raises(TypeError, lambda work=work: bool(work), "bool(work)", "no truth value")  # type: ignore[misc]
        work.wait()


def a_callback_that_raises(group: ProcessGroup) -> None:
    """Check that an error in a callback reaches only the future that `then` returned."""

    def fail(_: torch.futures.Future[list[torch.Tensor]]) -> None:
        raise ValueError("the callback's own error")

    tensor = terms((3,), group.rank)
    work = group.all_reduce(tensor, async_op=True)
    chained = work.get_future().then(fail)
    work.wait()
    expect_raises(Exception, chained.wait, "future of a callback that raised", "the callback's own error")
    expect(tensor, sum_of_terms((3,), group.size), "tensor of the collective whose callback raised")
    group.barrier()


CHECKS: dict[str, Check] = {
    "in_flight_waited_for_backwards": waited_for_backwards,
    "in_flight_of_all_kinds": of_all_kinds,
    "in_flight_futures": futures,
    "in_flight_no_truth_value": no_truth_value,
    "in_flight_a_callback_that_raises": a_callback_that_raises,
}
