"""torch's options in our words, as tables."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import InvalidArgumentError, ReduceOp, premul_sum
from syncline.collectives.torch_bridge import call_issuer

NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [dist.AllreduceOptions, dist.ReduceOptions, dist.ReduceScatterOptions])
def test_reductions(kind, name: str) -> None:
    given = kind()
    given.reduceOp = getattr(dist.ReduceOp, name)
    assert call_issuer.reduction_of(given) is ReduceOp[name]
    assert call_issuer.reduction_of(getattr(dist.ReduceOp, name)) is ReduceOp[name]


def test_premul_sum() -> None:
    given = dist.AllreduceOptions()
    given.reduceOp = dist._make_nccl_premul_sum(0.25)
    assert call_issuer.reduction_of(given) == premul_sum(0.25)
    given.reduceOp = dist._make_nccl_premul_sum(torch.tensor([0.5]))
    assert call_issuer.reduction_of(given) == premul_sum(0.5)


def test_unknown_reduction() -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected a reduction of torch\.distributed such as ReduceOp\.SUM"):
        call_issuer.reduction_of("sum")


def test_defaults() -> None:
    assert call_issuer.reduction_of(None) is ReduceOp.SUM
    assert call_issuer.root_of(None) == 0


def test_roots() -> None:
    given = dist.BroadcastOptions()
    given.rootRank = 3
    assert call_issuer.root_of(given) == 3
    assert call_issuer.root_of(2) == 2


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (None, None),
        (timedelta(0), None),
        (dist.AllreduceOptions().timeout, None),
        (timedelta(milliseconds=1500), 1.5),
        (timedelta(days=2), 172_800.0),
    ],
)
def test_time_limits(timeout: timedelta | None, expected: float | None) -> None:
    assert call_issuer.time_limit_s(timeout) == expected


def test_one_device_in_each_process() -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected one input.*found 2"):
        call_issuer.only([torch.ones(1), torch.ones(1)], "input")
