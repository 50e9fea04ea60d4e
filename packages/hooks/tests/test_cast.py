from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from syncline.hooks.testing import FakeBucket

pytestmark = pytest.mark.ranks


def gradients(rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [((torch.arange(6.0).view(2, 3) + 1) / 3 * (rank + 1)).to(dtype), torch.tensor([0.1 + rank]).to(dtype)]


def reduced(world_size: int, hook: Any, make: Any = gradients, state: Any = None) -> list[torch.Tensor]:
    def body(group: ProcessGroup) -> torch.Tensor:
        bucket = FakeBucket(make(group.rank), group)
        buffer = bucket.buffer()
        result = hook(state, bucket).wait()
        assert result is buffer
        assert bucket.buffer() is buffer, "the bucket is left as it was found"
        return buffer

    return run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_bf16_averages_in_bfloat16_and_restores_the_dtype(world_size: int, dtype: torch.dtype) -> None:
    results = reduced(world_size, bf16_compress_hook, lambda rank: gradients(rank, dtype))

    terms = [torch.cat([g.reshape(-1) for g in gradients(r, dtype)]).bfloat16().float() for r in range(world_size)]
    expected = torch.stack(terms).mean(0)
    for result in results:
        assert result.dtype == dtype
        torch.testing.assert_close(result.float(), expected, rtol=2**-8, atol=0)
        assert torch.equal(result, result.bfloat16().to(dtype)), "more than 8 bits survived: it was not cast"
        assert torch.equal(result, results[0])


def test_bf16_keeps_what_a_half_cannot_hold() -> None:
    for result in reduced(2, bf16_compress_hook, lambda rank: [torch.tensor([1e30, 65536.0])]):
        torch.testing.assert_close(result, torch.tensor([1e30, 65536.0]), rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    ("wrapper", "hook"), [(fp16_compress_wrapper, fp16_compress_hook), (bf16_compress_wrapper, bf16_compress_hook)]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_wrapped_allreduce_is_the_casting_hook(wrapper: Any, hook: Any, world_size: int) -> None:
    for ours, theirs in zip(reduced(world_size, wrapper(allreduce_hook)), reduced(world_size, hook), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("wrapper", "dtype"), [(fp16_compress_wrapper, torch.float16), (bf16_compress_wrapper, torch.bfloat16)]
)
def test_the_wrapped_hook_sees_halves_everywhere_and_its_own_state(wrapper: Any, dtype: torch.dtype) -> None:
    seen = []

    def spy(state: Any, bucket: Any) -> Any:
        seen.append((state, bucket.buffer().dtype, [(g.dtype, g.shape) for g in bucket.gradients()]))
        return allreduce_hook(None, bucket)

    reduced(1, wrapper(spy), state="mine")

    assert seen == [("mine", dtype, [(dtype, torch.Size([2, 3])), (dtype, torch.Size([1]))])]


def test_wrappers_nest() -> None:
    for result in reduced(2, fp16_compress_wrapper(bf16_compress_wrapper(allreduce_hook))):
        assert torch.equal(result, result.bfloat16().float())


def test_a_hook_that_returns_the_future_of_a_work_can_be_wrapped() -> None:
    def raw(state: Any, bucket: Any) -> Any:
        return bucket.process_group().all_reduce(bucket.buffer(), async_op=True).get_future()

    for result in reduced(2, fp16_compress_wrapper(raw)):
        assert torch.equal(result, sum(torch.cat([g.half().float().reshape(-1) for g in gradients(r)]) for r in (0, 1)).half())


def test_only_a_hook_can_be_wrapped() -> None:
    with pytest.raises(InvalidArgumentError, match=r"a hook to wrap.*found int"):
        fp16_compress_wrapper(3)  # type: ignore[arg-type]  # on purpose


def test_a_wrapped_hook_that_returns_no_tensor_fails_its_future() -> None:
    def nothing(state: Any, bucket: Any) -> Any:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def body(group: ProcessGroup) -> None:
        with pytest.raises((MisuseError, RuntimeError), match="to hold the reduced bucket, found NoneType"):
            bf16_compress_wrapper(nothing)(None, FakeBucket(gradients(0), group)).wait()

    run_ranks(1, body)


@pytest.mark.parametrize(
    "hook",
    [fp16_compress_hook, bf16_compress_hook, fp16_compress_wrapper(allreduce_hook), bf16_compress_wrapper(allreduce_hook)],
)
def test_complex_gradients_are_refused_for_a_cast_would_lose_half_of_them(hook: Any) -> None:
    with pytest.raises(MisuseError, match=r"of a floating-point dtype to cast to .*, found torch.complex64"):
        reduced(1, hook, lambda _: [torch.tensor([1 + 2j])])
