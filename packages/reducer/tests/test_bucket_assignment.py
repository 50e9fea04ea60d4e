from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.collectives import InvalidArgumentError
from syncline.reducer import BucketAssignment, GradientSpec, assign_buckets

# Tensors on the meta device have sizes but no memory, and are a second device beside the CPU.
KINDS = [
    (torch.float32, "meta"),
    (torch.float16, "meta"),
    (torch.float64, "meta"),
    (torch.bfloat16, "meta"),
    (torch.float32, "cpu"),
]


@dataclass(frozen=True)
class Gradient:
    numel: int
    kind: tuple[torch.dtype, str]
    sparse: bool

    def tensor(self) -> torch.Tensor:
        dtype, device = self.kind
        return torch.empty(self.numel, dtype=dtype, device=device)

    def spec(self) -> GradientSpec:
        return GradientSpec(self.numel * self.kind[0].itemsize, self.kind, self.sparse)


def decoded(number: int) -> Gradient:
    """One integer is one gradient: hypothesis draws it faster than three values, and still shrinks it well."""
    number, kind = divmod(number, len(KINDS))
    number, sparse = divmod(number, 5)
    return Gradient(number, KINDS[kind], sparse == 4)


GRADIENTS = st.lists(st.integers(0, 5 * len(KINDS) * 400).map(decoded), min_size=1, max_size=24)
CAPS = st.lists(st.one_of(st.integers(0, 64), st.integers(0, 4000)), min_size=1, max_size=4)


def torch_says(gradients: list[Gradient], caps: list[int], order: list[int] | None) -> list[BucketAssignment]:
    """torch wants the tensors themselves in the order of arrival, and calls a sparse bucket's missing cap 0."""
    visited = list(range(len(gradients))) if order is None else order
    buckets, caps_found = dist._compute_bucket_assignment_by_size(
        [gradients[index].tensor() for index in visited],
        caps,
        [gradient.sparse for gradient in gradients],
        [] if order is None else order,
    )
    return [
        BucketAssignment(tuple(bucket), None if gradients[bucket[0]].sparse else cap)
        for bucket, cap in zip(buckets, caps_found, strict=True)
    ]


@given(GRADIENTS, CAPS)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_without_an_order_it_is_what_torch_does(gradients: list[Gradient], caps: list[int]) -> None:
    assert assign_buckets([gradient.spec() for gradient in gradients], caps) == torch_says(gradients, caps, None)


@given(GRADIENTS, CAPS, st.randoms(use_true_random=False))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_with_an_order_it_is_what_torch_does(gradients: list[Gradient], caps: list[int], random: Random) -> None:
    order = list(range(len(gradients)))
    random.shuffle(order)

    ours = assign_buckets([gradient.spec() for gradient in gradients], caps, order)
    theirs = torch_says(gradients, caps, order)

    # torch takes the buckets that never reached their cap out of a hash table; only these have no order there.
    closed = len(ours) - leftovers(gradients, ours)
    assert ours[:closed] == theirs[:closed]
    assert set(ours[closed:]) == set(theirs[closed:])
    assert len(ours) == len(theirs)
    arrival = {index: place for place, index in enumerate(order)}
    last_arrivals = [arrival[bucket.indices[-1]] for bucket in ours[closed:]]
    assert last_arrivals == sorted(last_arrivals)


def leftovers(gradients: list[Gradient], buckets: list[BucketAssignment]) -> int:
    return sum(
        bucket.cap_bytes is not None and sum(gradients[i].spec().nbytes for i in bucket.indices) < bucket.cap_bytes
        for bucket in buckets
    )


def dense(*nbytes: int, kind: str = "a") -> list[GradientSpec]:
    return [GradientSpec(n, kind) for n in nbytes]


@pytest.mark.parametrize(
    ("specs", "caps", "order", "expected"),
    [
        pytest.param([], [10], None, [], id="nothing"),
        pytest.param(dense(1), [10], None, [((0,), 10)], id="one, below the cap"),
        pytest.param(dense(4, 6, 1), [10], None, [((0, 1), 10), ((2,), 10)], id="the cap is reached exactly"),
        pytest.param(dense(9, 9, 9), [10], None, [((0, 1), 10), ((2,), 10)], id="a bucket may exceed its cap"),
        pytest.param(dense(99, 1), [10], None, [((0,), 10), ((1,), 10)], id="one gradient above the cap"),
        pytest.param(dense(5, 5, 5, 5, 5), [5, 10], None, [((0,), 5), ((1, 2), 10), ((3, 4), 10)], id="the last cap lasts"),
        pytest.param(dense(1, 1), [0], None, [((0,), 0), ((1,), 0)], id="a cap of 0 gives each its own"),
        pytest.param(dense(0, 0, 5), [5], None, [((0, 1, 2), 5)], id="empty gradients fill nothing"),
        pytest.param(dense(5, 5, 5), [10], [2, 0, 1], [((2, 0), 10), ((1,), 10)], id="in order of arrival"),
        pytest.param(
            [*dense(5), *dense(5, kind="b"), *dense(5), *dense(5, kind="b")],
            [10],
            None,
            [((0, 2), 10), ((1, 3), 10)],
            id="kinds do not mix",
        ),
        pytest.param(
            [*dense(5), *dense(10, kind="b"), *dense(5), *dense(20, kind="b")],
            [5, 20],
            None,
            [((0,), 5), ((1,), 5), ((2,), 20), ((3,), 20)],
            id="each kind has its own first cap",
        ),
        pytest.param(
            [*dense(5), GradientSpec(99, "a", sparse=True), *dense(5)],
            [10],
            None,
            [((0, 2), 10), ((1,), None)],
            id="a sparse gradient is alone and has no cap",
        ),
        pytest.param(
            [*dense(1), *dense(1, kind="b"), *dense(1)],
            [10],
            [0, 1, 2],
            [((1,), 10), ((0, 2), 10)],
            id="leftovers by the arrival of their last member",
        ),
    ],
)
def test_table(
    specs: list[GradientSpec], caps: list[int], order: list[int] | None, expected: list[tuple[tuple[int, ...], int | None]]
) -> None:
    assert assign_buckets(specs, caps, order) == [BucketAssignment(*entry) for entry in expected]


@pytest.mark.parametrize("caps", [[], [-1], [10, -1]])
def test_refuses_caps(caps: list[int]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"at least one bucket size limit, none below 0 bytes, found \["):
        assign_buckets(dense(1, 2), caps)


@pytest.mark.parametrize("order", [[], [0], [0, 0], [0, 1, 1], [0, 2], [1, 2], [-1, 0]])
def test_refuses_an_order_that_is_no_permutation(order: list[int]) -> None:
    with pytest.raises(InvalidArgumentError, match="names each of the 2 gradients once"):
        assign_buckets(dense(1, 2), [10], order)
