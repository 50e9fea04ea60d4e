"""Sparse gradients: reduced as sparse, averaged; the oracle is the mean of the ranks' dense gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.reducer import GradBucket, Reducer

pytestmark = pytest.mark.ranks

ROWS = {0: [0, 1, 1], 1: [4, 1], 2: [2, 3, 0, 0]}  # other elements, and as many others, on each rank


def make_model(kind: str) -> torch.nn.Module:
    table: torch.nn.Module
    if kind == "bag":
        table = torch.nn.EmbeddingBag(5, 3, mode="sum", sparse=True, dtype=torch.float64)
    else:
        table = torch.nn.Embedding(5, 3, sparse=True, dtype=torch.float64)
    with torch.no_grad():
        table.weight.copy_(torch.arange(15.0).view(5, 3))  # type: ignore[operator, union-attr]
    head = torch.nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.arange(6.0).view(2, 3) - 2)
        head.bias.zero_()
    return torch.nn.ModuleDict({"table": table, "head": head})


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    rows = torch.tensor(ROWS[rank])
    found = model["table"](rows.unsqueeze(0) if isinstance(model["table"], torch.nn.EmbeddingBag) else rows)
    return model["head"](found).square().sum() * (rank + 1 + step)  # type: ignore[no-any-return]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["embedding", "bag"])
@pytest.mark.parametrize("as_view", [False, True])
def test_sparse_gradients_are_averaged_and_stay_sparse(world_size: int, kind: str, as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        model = make_model(kind)
        reducer = Reducer(list(model.named_parameters()), group, sparse=[True, False, False], gradient_as_bucket_view=as_view)
        reducer.rebuild_buckets()
        assert [[reducer.names[i] for i in bucket.indices] for bucket in reducer.buckets if not bucket.views] == [
            ["table.weight"]
        ]
        for step in range(3):
            model.zero_grad()
            reducer.prepare_for_backward()
            loss_of(model, group.rank, step).backward()
            oracle = make_model(kind)
            for rank in range(world_size):
                (loss_of(oracle, rank, step) / world_size).backward()
            found, expected = model["table"].weight.grad, oracle["table"].weight.grad  # type: ignore[index, union-attr]
            assert found.layout is torch.sparse_coo
            assert found.is_coalesced()
            assert found._nnz() == len({row for rank in range(world_size) for row in ROWS[rank]})
            torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-12, atol=0)
            torch.testing.assert_close(model["head"].weight.grad, oracle["head"].weight.grad, rtol=1e-12, atol=0)  # type: ignore[index, union-attr]
        assert {times.nbytes for times in reducer.statistics.buckets} == {64, len(set(ROWS[group.rank])) * (8 + 24)}

    run_ranks(world_size, body)


def test_what_was_accumulated_without_synchronisation_is_averaged_with_the_rest() -> None:
    def body(group: ProcessGroup) -> torch.Tensor:
        model, oracle = make_model("embedding"), make_model("embedding")
        reducer = Reducer(list(model.named_parameters()), group, sparse=[True, False, False])
        reducer.prepare_for_backward(synchronizes=False)
        loss_of(model, group.rank, 0).backward()
        reducer.prepare_for_backward()
        loss_of(model, group.rank, 1).backward()
        for rank in range(2):
            for step in range(2):
                (loss_of(oracle, rank, step) / 2).backward()
        found, expected = (m["table"].weight.grad.to_dense() for m in (model, oracle))  # type: ignore[index, union-attr]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        return found

    results = run_ranks(2, body)
    assert torch.equal(*results)


def test_a_hook_sees_the_sparse_gradient() -> None:
    def body(group: ProcessGroup) -> None:
        model = make_model("embedding")
        reducer = Reducer(list(model.named_parameters()), group, sparse=[True, False, False])
        seen = []

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            seen.append(
                (bucket.buffer().layout, [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()])
            )
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer() * 3)
            return future

        reducer.set_hook(hook)
        reducer.prepare_for_backward()
        loss_of(model, group.rank, 0).backward()
        alone = make_model("embedding")
        loss_of(alone, group.rank, 0).backward()
        for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert found.grad is not None
            assert expected.grad is not None
            assert torch.equal(found.grad.to_dense(), expected.grad.to_dense() * 3)
        assert sorted(map(str, seen)) == ["(torch.sparse_coo, True)", "(torch.strided, True)"]

    run_ranks(2, body)


def test_a_hook_that_writes_to_its_bucket_leaves_what_nobody_used_as_it_was() -> None:
    def body(group: ProcessGroup) -> None:
        model = make_model("embedding")
        named = list(model.named_parameters())
        reducer = Reducer(named, group, sparse=[True, False, False], find_unused_parameters=True)

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer()
            (buffer.values() if buffer.is_sparse else buffer).mul_(5)
            return group.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])

        reducer.set_hook(hook)
        table: Any = model["table"]  # type: ignore[index]
        table.weight.grad = torch.eye(5, 3, dtype=torch.float64).to_sparse(1)  # coalesced: taking it makes no copy
        reducer.prepare_for_backward()
        model["head"](torch.ones(1, 3, dtype=torch.float64)).sum().backward()  # type: ignore[index]
        assert torch.equal(table.weight.grad.to_dense(), torch.eye(5, 3, dtype=torch.float64))

    run_ranks(2, body)


def test_a_hook_that_returns_a_sparse_gradient_of_another_shape_is_refused_by_name() -> None:
    def body(group: ProcessGroup) -> None:
        model = make_model("embedding")
        reducer = Reducer(list(model.named_parameters()), group, sparse=[True, False, False])

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            buffer = bucket.buffer()
            future.set_result(buffer.to_dense().reshape(3, 5).to_sparse(1) if buffer.is_sparse else buffer)
            return future

        reducer.set_hook(hook)
        reducer.prepare_for_backward()
        with pytest.raises(MisuseError, match=r"of shape \[5, 3\], on cpu and returned one .* \[3, 5\].*table\.weight"):
            loss_of(model, group.rank, 0).backward()

    run_ranks(2, body)


def test_a_dense_gradient_of_a_parameter_announced_as_sparse_is_refused_by_name() -> None:
    def body(group: ProcessGroup) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        reducer = Reducer([("tied", parameter)], group, sparse=[True])
        reducer.prepare_for_backward()
        with pytest.raises(
            MisuseError, match=r"expected a sparse gradient for parameter 'tied'.*found a dense one.*sparse=False"
        ):
            parameter.sum().backward()

    run_ranks(2, body)


def test_there_is_a_flag_for_each_parameter() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match="`sparse` flag for each of 1 parameters, found 2"):
            Reducer([("p", torch.nn.Parameter(torch.ones(3)))], group, sparse=[True, False])

    run_ranks(1, body)
