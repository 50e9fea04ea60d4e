from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from syncline.hooks.orthogonalize import orthogonalize


def identity_error(columns: torch.Tensor) -> float:
    gram = columns.double().transpose(1, 2) @ columns.double()
    return float((gram - torch.eye(columns.shape[2], dtype=torch.float64)).abs().max())


@pytest.mark.parametrize("columns", [1, 2, 3, 5])
@pytest.mark.parametrize("epsilon", [0.0, 1e-12])
def test_each_matrix_of_a_batch_gets_orthonormal_columns_that_span_the_same(columns: int, epsilon: float) -> None:
    matrices = torch.randn(4, 9, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrices *= torch.tensor([1.0, 1e6, 1e-6, 3.0]).view(4, 1, 1)
    given = matrices.clone()

    found = orthogonalize(matrices, epsilon)

    assert torch.equal(matrices, given)
    assert identity_error(found) < 1e-5 if epsilon else identity_error(found) < 1e-13
    for one, original in zip(found, given, strict=True):
        torch.testing.assert_close(one @ (one.T @ original), original, rtol=1e-5, atol=1e-5 * float(original.abs().max()))


def test_nearly_dependent_columns_are_orthogonal_to_rounding() -> None:
    """Classical Gram-Schmidt fails here: 1e-3 of non-orthogonality and more."""
    first = torch.randn(1, 50, 1, generator=torch.Generator().manual_seed(2))
    second = first + 1e-4 * torch.randn(1, 50, 1, generator=torch.Generator().manual_seed(3))

    assert identity_error(orthogonalize(torch.cat([first, second], dim=2))) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [2, 4])
def test_halves_are_computed_in_float32(dtype: torch.dtype, columns: int) -> None:
    """The square of 3e4 is beyond float16, that of 1e-5 below it."""
    matrices = torch.randn(2, 40, columns, generator=torch.Generator().manual_seed(4)) * torch.tensor([8e3, 1e-5]).view(2, 1, 1)

    found = orthogonalize(matrices.to(dtype))

    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), orthogonalize(matrices.to(dtype).float()), rtol=0, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_columns_without_a_direction_of_their_own_are_replaced(columns: int) -> None:
    zeros = torch.zeros(1, 6, columns)
    equal = torch.ones(1, 6, columns)
    for found in (orthogonalize(zeros), orthogonalize(equal)):
        assert identity_error(found) < 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_nan_and_infinity_stay_in_their_matrix_and_show(bad: float, columns: int) -> None:
    matrices = torch.randn(2, 8, columns, generator=torch.Generator().manual_seed(5))
    matrices[0, 2, 0] = bad

    found = orthogonalize(matrices)

    assert found[0].isnan().any()
    assert identity_error(found[1:]) < 1e-5


def test_epsilon_is_added_to_the_length() -> None:
    matrices = torch.tensor([[[3.0], [4.0]]])

    assert torch.allclose(orthogonalize(matrices, 5.0), torch.tensor([[[0.3], [0.4]]]))


@pytest.mark.parametrize("columns", [1, 2, 3, 5])
def test_a_large_epsilon_counts_where_it_does_in_torch(columns: int) -> None:
    matrices = torch.randn(2, 9, columns, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    torchs = matrices.clone()
    _orthogonalize(torchs, 0.5)

    found = orthogonalize(matrices, 0.5)

    first = slice(None, 1)  # torch does not orthogonalize the others fully then
    torch.testing.assert_close(found[:, :, first].abs(), torchs[:, :, first].abs())
    if columns > 2:
        torch.testing.assert_close(found.abs(), torchs.abs())


@pytest.mark.parametrize("columns", [1, 2])
def test_a_column_too_long_for_its_dtype_becomes_nan(columns: int) -> None:
    matrices = torch.randn(2, 6, columns)
    matrices[0] *= 1e25
    found = orthogonalize(matrices)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()
