from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.collectives import DisagreementError, MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.hooks import (
    CompressionState,
    Int8,
    PowerSGDState,
    RandomK,
    Sites,
    TopK,
    adasum_hook,
    allreduce_hook,
    batched_powerSGD_hook,
    bf16_between_sites_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    compression_hook,
    contract,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
    powerSGD_hook,
)

pytestmark = pytest.mark.ranks

WORLD_SIZES = [1, 2, 3, 4]
Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class FakeBucket:
    """The hook contract without a reducer: one parameter that fills the whole bucket."""

    def __init__(self, buffer: torch.Tensor, group: ProcessGroup) -> None:
        self._buffer = buffer
        self._group = group

    def index(self) -> int:
        return 0

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        return [self._buffer]

    def parameters(self) -> list[torch.Tensor]:
        return [torch.zeros_like(self._buffer)]

    def is_last(self) -> bool:
        return True

    def process_group(self) -> ProcessGroup:
        return self._group


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Differ by rank and by index; small integers, exact in every dtype."""
    return (torch.arange(numel) + 2 * rank + 1).to(dtype)


def mean(world_size: int, numel: int) -> torch.Tensor:
    return torch.stack([values(rank, numel, torch.float64) for rank in range(world_size)]).mean(0)


def run_hook(
    world_size: int, hook: Hook, make: Callable[[int], torch.Tensor], *, with_state: bool = False
) -> list[torch.Tensor]:
    """What the hook makes of each rank's buffer; it must come in the buffer itself, where the reducer saves a copy."""

    def body(group: ProcessGroup) -> torch.Tensor:
        buffer = make(group.rank)
        result = hook(group if with_state else None, FakeBucket(buffer, group)).wait()
        assert result is buffer
        return result

    return run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_state", [True, False], ids=["group-as-state", "buckets-group"])
def test_allreduce_averages_in_the_buckets_dtype(world_size: int, dtype: torch.dtype, with_state: bool) -> None:
    results = run_hook(world_size, allreduce_hook, lambda rank: values(rank, 11, dtype), with_state=with_state)

    for result in results:
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), mean(world_size, 11), rtol=torch.finfo(dtype).eps, atol=0)
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_state", [True, False], ids=["group-as-state", "buckets-group"])
def test_fp16_averages_as_halves_and_restores_the_dtype(world_size: int, dtype: torch.dtype, with_state: bool) -> None:
    results = run_hook(world_size, fp16_compress_hook, lambda rank: values(rank, 11, dtype), with_state=with_state)

    expected = mean(world_size, 11).float().half().to(dtype)
    for result in results:
        assert result.dtype == dtype
        assert torch.equal(result, expected)


def test_fp16_loses_what_a_half_cannot_hold() -> None:
    """It would pass with any dtype otherwise: 2049 has 12 bits, a half has 11."""
    for result in run_hook(2, fp16_compress_hook, lambda rank: torch.tensor([2049.0, 1 + 2**-12, 1.5])):
        assert result.tolist() == [2048.0, 1.0, 1.5]


def test_fp16_sends_two_bytes_for_each_element() -> None:
    class Watching:
        def __init__(self, group: ProcessGroup) -> None:
            self.group, self.dtypes = group, list[torch.dtype]()

        def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.dtypes.append(tensor.dtype)
            return self.group.all_reduce(tensor, *args, **kwargs)

    def body(group: ProcessGroup) -> list[torch.dtype]:
        watching = Watching(group)
        ProcessGroup.register(Watching)
        bucket = FakeBucket(torch.ones(3), watching)  # type: ignore[arg-type]  # a fake
        fp16_compress_hook(None, bucket).wait()
        return watching.dtypes

    assert run_ranks(2, body) == [[torch.float16]] * 2


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_fp16_sums_beyond_its_range_do_no_harm(world_size: int) -> None:
    largest = torch.finfo(torch.float16).max
    for result in run_hook(world_size, fp16_compress_hook, lambda rank: torch.tensor([largest, -largest, 60000.0])):
        assert result.tolist() == [largest, -largest, 60000.0]


@pytest.mark.parametrize("huge", [65536.0, 1e30])
def test_fp16_makes_one_gradient_beyond_its_range_infinite_everywhere(huge: float) -> None:
    def make(rank: int) -> torch.Tensor:
        return torch.tensor([huge, -huge, 1.0]) if rank == 1 else torch.ones(3)

    for result in run_hook(3, fp16_compress_hook, make):
        assert result.tolist() == [math.inf, -math.inf, 1.0]


@pytest.mark.parametrize("hook", [allreduce_hook, fp16_compress_hook])
def test_a_nan_reaches_every_rank(hook: Hook) -> None:
    for result in run_hook(2, hook, lambda rank: torch.tensor([math.nan if rank == 1 else 1.0, 2.0])):
        assert math.isnan(result[0])
        assert result[1] == 2.0


def test_noop_leaves_every_rank_its_own() -> None:
    results = run_hook(3, noop_hook, lambda rank: values(rank, 5, torch.float32))

    for rank, result in enumerate(results):
        assert torch.equal(result, values(rank, 5, torch.float32))


def test_noop_communicates_nothing() -> None:
    """One rank alone can call it: nobody has to answer."""

    def body(group: ProcessGroup) -> bool:
        return group.rank != 0 or noop_hook(None, FakeBucket(torch.ones(2), group)).done()

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("hook", [allreduce_hook, fp16_compress_hook])
def test_hooks_return_before_the_collective_has_finished(hook: Hook) -> None:
    """Rank 0 calls alone and gets a future; rank 1 calls only when rank 0 has it. A blocking hook would wait for ever."""
    import threading

    rank_0_has_its_future = threading.Event()

    def body(group: ProcessGroup) -> tuple[bool, float]:
        if group.rank == 1:
            assert rank_0_has_its_future.wait(20.0)
        future = hook(None, FakeBucket(torch.full((2,), float(group.rank)), group))
        pending = not future.done()
        rank_0_has_its_future.set()
        return pending, float(future.wait()[0])

    results = run_ranks(2, body)
    assert results[0] == (True, 0.5)
    assert results[1][1] == 0.5


@pytest.mark.parametrize("hook", [allreduce_hook, fp16_compress_hook])
def test_a_failed_collective_fails_the_future(hook: Hook) -> None:
    def body(group: ProcessGroup) -> None:
        future = hook(None, FakeBucket(torch.ones(2 + group.rank), group))
        with pytest.raises((DisagreementError, RuntimeError), match="the ranks called different collectives"):
            future.wait()

    run_ranks(2, body)


@pytest.mark.parametrize("hook", [allreduce_hook, fp16_compress_hook])
def test_torchs_ddp_gets_an_error_that_cpp_sees(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the bucket is torch's. The text is that of the collective's error; torch wraps the part in C++ anew."""
    monkeypatch.setattr(contract.dist, "GradBucket", FakeBucket)

    def body(group: ProcessGroup) -> None:
        future = hook(group, FakeBucket(torch.ones(2 + group.rank), group))
        with pytest.raises(RuntimeError, match="the ranks called different collectives"):
            torch._C._distributed_c10d._create_work_from_future(future).get_future().wait()  # type: ignore[attr-defined]

    run_ranks(2, body)


def embedding_gradient(rank: int) -> torch.Tensor:
    """Each rank has one row of its own, and row 0."""
    values = torch.tensor([[1.0, 2.0], [4.0, 8.0]]) * (rank + 1)
    indices = torch.tensor([[0, rank + 1]])
    return torch.sparse_coo_tensor(indices, values, (5, 2), check_invariants=True).coalesce()


NEED_DENSE: dict[str, tuple[Any, Callable[[ProcessGroup], Any]]] = {
    "PowerSGD": (powerSGD_hook, lambda _: PowerSGDState(None)),
    "batched PowerSGD": (batched_powerSGD_hook, lambda _: PowerSGDState(None)),
    "int8": (compression_hook, lambda _: CompressionState(Int8())),
    "top": (compression_hook, lambda _: CompressionState(TopK(0.5))),
    "random": (compression_hook, lambda _: CompressionState(RandomK(0.5), use_error_feedback=False)),
    "Adasum": (adasum_hook, lambda _: None),
    "between sites": (bf16_between_sites_hook, lambda group: Sites(group, "a")),
    "PowerSGD of halves": (fp16_compress_wrapper(powerSGD_hook), lambda _: PowerSGDState(None)),
}


@pytest.mark.parametrize(("hook", "make_state"), NEED_DENSE.values(), ids=NEED_DENSE.keys())
def test_hooks_that_need_dense_gradients_refuse_sparse_ones_with_the_remedy(hook: Any, make_state: Any) -> None:
    def body(group: ProcessGroup) -> None:
        state = make_state(group)
        bucket = FakeBucket(embedding_gradient(group.rank), group)
        message = r"expected a dense gradient .*, found a sparse one of shape \[5, 2\]; use allreduce_hook, or .* sparse=False"
        with pytest.raises(MisuseError, match=message):
            hook(state, bucket)

    run_ranks(2, body)


@pytest.mark.parametrize(
    "hook",
    [
        allreduce_hook,
        fp16_compress_hook,
        bf16_compress_hook,
        fp16_compress_wrapper(allreduce_hook),
        bf16_compress_wrapper(allreduce_hook),
    ],
)
def test_the_other_hooks_average_sparse_gradients(hook: Hook) -> None:
    expected = sum(embedding_gradient(rank).to_dense() for rank in range(2)) / 2
    for result in run_hook(2, hook, embedding_gradient):
        assert torch.equal(result.to_dense(), expected)
