"""Backwards that do not reach every parameter, on each rank others."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from syncline.collectives import CollectiveTimeout, MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.reducer import GradBucket, Reducer
from test_support.chosen_gradients import CountingGroup
from test_support.training_runs import VIEWS

pytestmark = pytest.mark.ranks

COUNT = 5
# What rank r uses in step s: parameter 4 never, others on some ranks, rank 0 all the rest in step 2.
USES: list[dict[int, set[int]]] = [
    {0: {0, 1}, 1: {1, 2}, 2: {3}},
    {0: {3}, 1: {0}, 2: {0}},
    {0: {0, 1, 2, 3}, 1: {2}, 2: {1, 2}},
    {0: {2}, 1: {2}, 2: {2}},
]
Parameters = list[tuple[str, torch.nn.Parameter]]


def make_parameters() -> Parameters:
    return [(f"p{i}", torch.nn.Parameter(torch.ones(i + 2, dtype=torch.float64))) for i in range(COUNT)]


def coefficient(rank: int, index: int, step: int) -> torch.Tensor:
    return (rank + 1) * (torch.arange(index + 2, dtype=torch.float64) + 10 * index + 1) + 100 * step


def loss_of(parameters: Parameters, rank: int, step: int, used: Collection[int]) -> torch.Tensor:
    terms = [(parameters[index][1] * coefficient(rank, index, step)).sum() for index in used]
    return torch.stack(terms).sum()


def expected_gradient(world_size: int, index: int, step: int) -> torch.Tensor | None:
    ranks = [rank for rank in range(world_size) if index in USES[step][rank]]
    if not ranks:
        return None
    return torch.stack([coefficient(rank, index, step) for rank in ranks]).sum(0) / world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("cap", [0, 50, 1 << 20])
def test_average_counts_zeros_of_ranks_that_do_not_use_it(world_size: int, as_view: bool, skip: bool, cap: int) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(
            parameters,
            group,
            bucket_cap_bytes=cap,
            gradient_as_bucket_view=as_view,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=skip,
        )
        for step, uses in enumerate(USES):
            for _, parameter in parameters:
                parameter.grad = None
            reducer.prepare_for_backward()
            loss_of(parameters, group.rank, step, uses[group.rank]).backward()
            for index, (_, parameter) in enumerate(parameters):
                expected = expected_gradient(world_size, index, step)
                if expected is None:
                    assert parameter.grad is None, f"p{index} in step {step}"
                else:
                    torch.testing.assert_close(parameter.grad, expected, rtol=1e-15, atol=0)

    run_ranks(world_size, body)


class Marked(torch.Tensor):
    """Results of torch's functions have this type, too."""


def test_parameters_of_a_subclass_of_tensors_may_be_unused() -> None:
    def body(group: ProcessGroup) -> list[torch.Tensor | None]:
        named = [(name, torch.nn.Parameter(torch.ones(2).as_subclass(Marked))) for name in ("a", "b", "c")]
        reducer = Reducer(named, group, find_unused_parameters=True)
        (_, a), (_, b), (_, c) = named
        for _ in range(2):
            a.grad = b.grad = None
            reducer.prepare_for_backward()
            ((a if group.rank == 0 else b) * 2).sum().backward()
        return [a.grad, b.grad, c.grad]

    for a, b, c in run_ranks(2, body):
        assert (a.tolist(), b.tolist(), c) == ([1.0, 1.0], [1.0, 1.0], None)


@pytest.mark.parametrize("as_view", VIEWS)
def test_gradients_that_nobody_uses_keep_their_bits(as_view: bool) -> None:
    """A third of three times x is not always x, so what is left alone must not come back from the reduction."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view, find_unused_parameters=True)
        reducer.prepare_for_backward()
        loss_of(parameters, group.rank, 0, {0, 1}).backward()
        kept = parameters[0][1].grad
        assert kept is not None
        irregular = torch.rand(2, generator=torch.Generator().manual_seed(group.rank), dtype=torch.float64)
        kept.copy_(irregular)  # differs by rank, as what was accumulated may
        parameters[1][1].grad = None
        reducer.prepare_for_backward()
        loss_of(parameters, group.rank, 1, {1}).backward()
        assert parameters[0][1].grad is kept
        assert torch.equal(kept, irregular)

    run_ranks(3, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_what_was_used_only_without_synchronisation_is_reduced_too(as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(
            parameters,
            group,
            gradient_as_bucket_view=as_view,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=True,
            bucket_cap_bytes=0,
        )
        for step in range(2):
            for _, parameter in parameters:
                parameter.grad = None
            reducer.prepare_for_backward(synchronizes=False)
            loss_of(parameters, group.rank, step, {group.rank}).backward()
            reducer.prepare_for_backward()
            loss_of(parameters, group.rank, step, {3}).backward()
            for index in range(2):
                assert torch.equal(parameters[index][1].grad, coefficient(index, index, step) / 2)  # type: ignore[arg-type]
            assert parameters[2][1].grad is None

    run_ranks(2, body)


def test_skipping_saves_the_all_reduce_of_buckets_that_nobody_uses() -> None:
    def body(group: ProcessGroup) -> None:
        for skip, reduced in ((False, COUNT), (True, 2)):
            counting = CountingGroup(group)
            parameters = make_parameters()
            reducer = Reducer(
                parameters,
                counting,  # type: ignore[arg-type]  # a stand-in
                bucket_cap_bytes=0,
                find_unused_parameters=True,
                skip_all_reduce_unused_params=skip,
            )
            reducer.prepare_for_backward()
            loss_of(parameters, group.rank, 0, {group.rank}).backward()  # 0 here, 1 there
            assert counting.dtypes.count(torch.float64) == reduced
            assert counting.dtypes.count(torch.uint8) == 1 + skip

    run_ranks(2, body)


def test_outputs_that_are_no_part_of_the_loss() -> None:
    def body(group: ProcessGroup) -> None:
        trunk, left, right = (torch.nn.Linear(3, 3) for _ in range(3))
        model = torch.nn.ModuleDict({"trunk": trunk, "left": left, "right": right})
        reducer = Reducer(list(model.named_parameters()), group, find_unused_parameters=True)
        for step in range(4):
            model.zero_grad()
            reducer.prepare_for_backward()
            hidden = trunk(torch.ones(2, 3))
            outputs = left(hidden), right(hidden)
            outputs[step % 2].sum().backward()
            assert trunk.weight.grad is not None
            assert (left.weight.grad is None, right.weight.grad is None) == (step % 2 == 1, step % 2 == 0)

    run_ranks(2, body)


class NoGradientForTheSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first * second

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_gradient_that_autograd_leaves_undefined(find_unused: bool) -> None:
    """Reached, but given None: zero if it is defined elsewhere; if nowhere, None where unused parameters may be."""

    def body(group: ProcessGroup) -> None:
        first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
        reducer = Reducer([("1", first), ("2", second), ("3", third)], group, find_unused_parameters=find_unused)
        reducer.prepare_for_backward()
        mixed = first * second * third if group.rank == 0 else NoGradientForTheSecond.apply(first, second)  # type: ignore[no-untyped-call]
        (mixed + NoGradientForTheSecond.apply(first, third)).sum().backward()  # type: ignore[no-untyped-call]
        assert second.grad is not None
        assert second.grad.tolist() == [0.5, 0.5]

        first.grad = second.grad = third.grad = None
        reducer.prepare_for_backward()
        (NoGradientForTheSecond.apply(first, second) + NoGradientForTheSecond.apply(first, third)).sum().backward()  # type: ignore[no-untyped-call]
        if find_unused:
            assert second.grad is None
        else:
            assert second.grad is not None
            assert second.grad.tolist() == [0.0, 0.0]

    run_ranks(2, body)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_hook_is_told_which_bucket_is_the_last_of_those_that_are_not_skipped(world_size: int) -> None:
    def body(group: ProcessGroup) -> list[list[tuple[int, bool]]]:
        parameters = make_parameters()
        reducer = Reducer(
            parameters, group, bucket_cap_bytes=0, find_unused_parameters=True, skip_all_reduce_unused_params=True
        )
        calls: list[tuple[int, bool]] = []

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            calls.append((bucket.index(), bucket.is_last()))
            return group.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

        reducer.set_hook(hook)
        history = []
        for step, uses in enumerate(USES):
            reducer.prepare_for_backward()
            loss_of(parameters, group.rank, step, uses[group.rank]).backward()
            history.append(list(calls))
            calls.clear()
        return history

    for history in run_ranks(world_size, body):
        for uses, calls in zip(USES, history, strict=True):
            # A bucket to each parameter, the last one first.
            used = sorted(COUNT - 1 - index for index in set().union(*(uses[rank] for rank in range(world_size))))
            assert calls == [(number, number == used[-1]) for number in used]


def test_a_sparse_parameter_that_one_rank_does_not_use() -> None:
    def body(group: ProcessGroup) -> None:
        table, other = torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1)
        parameters = [("table", table.weight), ("weight", other.weight), ("bias", other.bias)]
        reducer = Reducer(parameters, group, sparse=[True, False, False], find_unused_parameters=True)
        for used_on in (1, None):
            table.weight.grad = None
            reducer.prepare_for_backward()
            inputs = table(torch.tensor([2])) if group.rank == used_on else torch.ones(1, 2)
            (other(inputs).sum() if used_on is None else other(torch.ones(1, 2)).sum() + inputs.sum()).backward()
            if used_on is None:
                assert table.weight.grad is None
            else:
                assert table.weight.grad is not None
                assert table.weight.grad.to_dense().tolist() == [[0, 0], [0, 0], [0.5, 0.5], [0, 0]]

    run_ranks(2, body)


def checkpointed_first(layer: Callable[..., torch.Tensor], after: Callable[..., torch.Tensor]) -> torch.Tensor:
    inputs = torch.ones(1, 2, requires_grad=True)
    return after(checkpoint(layer, inputs, use_reentrant=True)).sum()  # type: ignore[no-any-return]


def test_a_re_entrant_checkpoint_cannot_be_seen_into() -> None:
    def body(group: ProcessGroup) -> None:
        first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        model = torch.nn.Sequential(first, second)
        for after, complaint in (
            (second, r"'0\.(weight|bias)' became ready twice.*re-entrant checkpoint cannot be seen into.*static_graph=True"),
            (torch.nn.Identity(), "cannot see into a re-entrant checkpoint.*static_graph=True"),
        ):
            reducer = Reducer(list(model.named_parameters()), group, find_unused_parameters=True)
            reducer.prepare_for_backward()
            with pytest.raises(MisuseError, match=complaint):
                checkpointed_first(first, after).backward()
            reducer.close()

    run_ranks(2, body)


def test_a_backward_that_reaches_nothing_on_one_rank_is_named_by_the_others() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, find_unused_parameters=True)
        reducer.prepare_for_backward()
        group.set_timeout(1)
        if group.rank == 0:
            with pytest.raises(CollectiveTimeout, match="1"):
                loss_of(parameters, 0, 0, {0}).backward()
        else:
            (torch.ones(1, requires_grad=True) * 2).sum().backward()

    run_ranks(2, body)
