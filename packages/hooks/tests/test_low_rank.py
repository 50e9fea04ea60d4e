from __future__ import annotations

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

from syncline.collectives import InvalidArgumentError
from syncline.hooks import compression_ratio
from syncline.hooks.low_rank import plan_matrix
from syncline.hooks.seeds import SharedSeeds
from test_support.resnet18 import resnet18_shapes


@pytest.mark.parametrize(("rank", "papers"), [(1, 243), (2, 136), (4, 72)])
def test_resnet18_is_compressed_as_much_as_in_the_paper(rank: int, papers: int) -> None:
    assert round(compression_ratio(resnet18_shapes(), rank, min_compression_rate=1)) == papers


@pytest.mark.parametrize("shapes", [[], [(3, 0)]])
def test_gradients_without_elements_have_no_ratio(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(InvalidArgumentError, match="at least one element"):
        compression_ratio(shapes, 1)


@pytest.mark.parametrize(
    ("shape", "rank", "rate", "expected"),
    [
        ((100, 50), 1, 2, (100, 50, 1)),
        ((100, 50), 16, 2, (100, 50, 16)),
        ((100, 50), 17, 2, (100, 50, 0)),  # (100 + 50) * 17 * 2 = 5100, not below 5000
        ((8, 4, 3, 3), 2, 2, (8, 36, 2)),
        ((8, 4, 3, 3), 100, 1, (8, 36, 0)),  # rank 8 would send 352 for 288
        ((8, 4, 3, 3), 100, 0.1, (8, 36, 8)),
        ((7,), 1, 2, (7, 1, 0)),
        ((7,), 1, 0.1, (7, 1, 1)),
        ((), 1, 2, (1, 1, 0)),
        ((0, 5), 1, 2, (0, 5, 0)),
    ],
)
def test_what_is_compressed(shape: tuple[int, ...], rank: int, rate: float, expected: tuple[int, int, int]) -> None:
    plan = plan_matrix(shape, rank, rate)

    assert (plan.rows, plan.columns, plan.rank) == expected
    assert plan.numel_sent == ((plan.rows + plan.columns) * plan.rank or plan.rows * plan.columns)


@pytest.mark.parametrize("shape", [(100, 50), (8, 4, 3, 3), (7,), (1,), (12, 3)])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 1, 2, 10])
@pytest.mark.parametrize("rank", [1, 4, 100])
def test_torch_compresses_the_same(shape: tuple[int, ...], rank: int, rate: float) -> None:
    plan = plan_matrix(shape, rank, rate)
    limited = min(plan.rows, plan.columns, rank)

    assert plan.is_compressed == _should_compress(plan.rows, plan.columns, limited, rate)[0]


@pytest.mark.parametrize(
    ("seed", "drawn_by_numpy"),
    [
        (0, [209652396, 398764591, 924231285, 404868288, 441365315]),
        (7, [327741615, 976413892, 128500249, 296233462, 809211459]),
    ],
)
def test_the_seeds_are_those_that_numpy_draws(seed: int, drawn_by_numpy: list[int]) -> None:
    seeds = SharedSeeds(seed)

    assert [seeds.next() for _ in range(5)] == drawn_by_numpy


def test_seeds_go_on_where_their_state_was_taken() -> None:
    one, other = SharedSeeds(3), SharedSeeds(4)
    one.next()
    other.restore(one.state())

    assert [one.next() for _ in range(700)] == [other.next() for _ in range(700)]
