"""Gradients that cross between sites as halves."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from syncline.collectives import MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.hooks import Sites, bf16_between_sites_hook
from syncline.hooks.testing import FakeBucket

pytestmark = pytest.mark.ranks


def gradient(rank: int) -> torch.Tensor:
    """Values that bfloat16 does not hold."""
    return torch.arange(1.0, 200.0) / 7 * (rank + 1)


@pytest.mark.parametrize("labels", ["a", "ab", "aab", "aabb", "abab", "abcc"])
def test_the_means_of_sites_are_rounded_and_their_sum(labels: str) -> None:
    def body(group: ProcessGroup) -> torch.Tensor:
        bucket = FakeBucket([gradient(group.rank)], group)
        result = bf16_between_sites_hook(Sites(group, labels[group.rank]), bucket).wait()
        assert result is bucket.buffer()
        return result

    inside = [sum(gradient(rank) for rank, label in enumerate(labels) if label == site) for site in sorted(set(labels))]
    expected = sum((term / len(labels)).bfloat16().float() for term in inside).bfloat16().float()
    for result in run_ranks(len(labels), body):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("labels", ["aa", "ab", "aabb"])
def test_what_float16_can_hold_stays_finite(labels: str) -> None:
    def body(group: ProcessGroup) -> list[float]:
        bucket = FakeBucket([torch.tensor([40000.0, -65504.0, math.inf], dtype=torch.float16)], group)
        result: list[float] = bf16_between_sites_hook(Sites(group, labels[group.rank]), bucket).wait().tolist()
        return result

    # 39936 is 40000 in bfloat16.
    assert run_ranks(len(labels), body) == [[39936.0, -65504.0, math.inf]] * len(labels)


def test_only_halves_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: ProcessGroup) -> list[torch.dtype]:
        sites, crossed = Sites(group, "ab"[group.rank // 2]), []
        if sites.between is not None:
            reduce = sites.between.all_reduce
            monkeypatch.setattr(sites.between, "all_reduce", lambda tensor: (crossed.append(tensor.dtype), reduce(tensor)))
        bf16_between_sites_hook(sites, FakeBucket([gradient(group.rank)], group)).wait()
        return crossed

    assert run_ranks(4, body) == [[torch.bfloat16], [], [torch.bfloat16], []]


def test_buckets_cross_in_order() -> None:
    """Several in flight, many times: the ranks of a site broadcast at the same place of their group's order."""

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        sites, results = Sites(group, "ab"[group.rank // 2]), []
        for step in range(50):
            buckets = [FakeBucket([gradient(group.rank) * (step + number)], group) for number in range(6)]
            results += [future.wait() for future in [bf16_between_sites_hook(sites, bucket) for bucket in buckets]]
        return results

    first, *others = run_ranks(4, body)
    for step in range(50):
        for number in range(6):
            inside = [gradient(low) * (step + number) + gradient(low + 1) * (step + number) for low in (0, 2)]
            expected = sum((term / 4).bfloat16().float() for term in inside).bfloat16().float()
            assert torch.equal(first[6 * step + number], expected)
    assert all(torch.equal(mine, theirs) for other in others for mine, theirs in zip(first, other, strict=True))


def test_complex_gradients_are_refused_for_a_cast_would_lose_half_of_them() -> None:
    def body(group: ProcessGroup) -> None:
        bucket = FakeBucket([torch.tensor([1 + 2j])], group)
        with pytest.raises(MisuseError, match=r"of a floating-point dtype to cast to torch\.bfloat16, found torch\.complex64"):
            bf16_between_sites_hook(Sites(group, str(group.rank)), bucket)

    run_ranks(2, body)


def test_a_reduction_that_fails_is_an_error_and_nothing_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: ProcessGroup) -> None:
        sites = Sites(group, str(group.rank))
        begun: torch.futures.Future[int] = torch.futures.Future()
        begun.set_result(0)
        failed = begun.then(lambda _: 1 // 0)
        monkeypatch.setattr(sites.inside, "all_reduce", lambda *_, **__: SimpleNamespace(get_future=lambda: failed))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            bf16_between_sites_hook(sites, FakeBucket([gradient(group.rank)], group)).wait()

    run_ranks(2, body)
