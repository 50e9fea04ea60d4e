from __future__ import annotations

import numpy as np
import pytest
import torch

from syncline.collectives import MisuseError, ProcessGroup, adasum_coalesced
from syncline.collectives.testing import run_ranks
from syncline.hooks import adasum_hook
from syncline.hooks.testing import FakeBucket

pytestmark = pytest.mark.ranks


def gradients(rank: int) -> list[torch.Tensor]:
    """Two layers of very different sizes: their products must not mix."""
    generator = torch.Generator().manual_seed(rank)
    large = 1e3 * torch.randn(2, 3, generator=generator, dtype=torch.float64)
    return [large, torch.randn(4, generator=generator, dtype=torch.float64)]


def by_numpy(vectors: list[np.ndarray]) -> np.ndarray:
    """The formula of the paper, recursively: the upper half of a power of two ranks is combined like the lower one."""

    def combine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b

    def tree(some: list[np.ndarray]) -> np.ndarray:
        half = len(some) // 2
        return some[0] if half == 0 else combine(tree(some[:half]), tree(some[half:]))

    power = 2 ** (len(vectors).bit_length() - 1)
    surplus = vectors[power:]
    return tree([combine(a, surplus[i]) if i < len(surplus) else a for i, a in enumerate(vectors[:power])])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8])
def test_adasum_is_the_formula_of_the_paper_layer_by_layer(world_size: int) -> None:
    def body(group: ProcessGroup) -> list[torch.Tensor]:
        bucket = FakeBucket(gradients(group.rank), group)
        assert adasum_hook(None, bucket).wait() is bucket.buffer()
        return bucket.gradients()

    results = run_ranks(world_size, body)
    for layer in range(2):
        vectors = [gradients(rank)[layer].numpy().ravel() for rank in range(world_size)]
        for result in results:
            np.testing.assert_allclose(result[layer].numpy().ravel(), by_numpy(vectors), rtol=1e-11)
            assert torch.equal(result[layer], results[0][layer])


def test_tensors_of_inference_mode_are_combined() -> None:
    def body(group: ProcessGroup) -> list[float]:
        with torch.inference_mode():
            tensor = torch.tensor([1.0, 0.0]) if group.rank == 0 else torch.tensor([0.0, 2.0])
        adasum_coalesced([tensor], group)
        return tensor.tolist()

    assert run_ranks(2, body) == [[1.0, 2.0]] * 2


def test_a_rank_without_a_gradient_changes_nothing() -> None:
    def body(group: ProcessGroup) -> torch.Tensor:
        bucket = FakeBucket([torch.tensor([1.0, 2.0]) * (group.rank == 1)], group)
        return adasum_hook(None, bucket).wait()

    assert [result.tolist() for result in run_ranks(3, body)] == [[1.0, 2.0]] * 3


def test_integers_are_refused() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(MisuseError, match="for Adasum"):
            adasum_hook(None, FakeBucket([torch.tensor([1, 2])], group))

    run_ranks(1, body)
