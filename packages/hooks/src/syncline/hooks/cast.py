"""Compression by casts: hooks that average in 16 bits, and wrappers that cast the bucket of any hook to 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from syncline.collectives import InvalidArgumentError, MisuseError, ReduceOp

from .contract import Bucket, TensorFuture, communication_hook, floating_buffer, group_of


@communication_hook
def fp16_compress_hook(process_group: Any, bucket: Bucket) -> TensorFuture:
    """Cast the bucket to float16, average it over the ranks, and cast the result back.

    The sum over the ranks is computed in float32, divided by the number of ranks, and only then rounded to float16. So a sum
    cannot overflow: an element becomes infinite only if a rank's gradient itself is above 65,504, the limit of float16. (Over
    NCCL, each gradient is divided first, and the result of each addition is rounded.)

    Args:
        process_group: a group of Syncline or torch; None: the group of the DDP.
        bucket: the gradients, of a floating-point dtype.

    Returns:
        A future of the bucket's buffer.

    Cost, for each element: two bytes in one all_reduce, and two bytes of extra memory.
    """
    return _average_as(torch.float16, process_group, bucket)


@communication_hook
def bf16_compress_hook(process_group: Any, bucket: Bucket) -> TensorFuture:
    """Cast the bucket to bfloat16, average it over the ranks, and cast the result back.

    bfloat16 has the range of float32, but only 8 bits of precision. The sum over the ranks is computed in float32, divided by
    the number of ranks, and only then rounded. (Over NCCL, each gradient is divided first, and the result of each addition is
    rounded.)

    Args:
        process_group: a group of Syncline or torch; None: the group of the DDP.
        bucket: the gradients, of a floating-point dtype.

    Returns:
        A future of the bucket's buffer.

    Cost, for each element: two bytes in one all_reduce, and two bytes of extra memory.
    """
    return _average_as(torch.bfloat16, process_group, bucket)


# Without NCCL, torch's register_comm_hook refuses a hook with the name of torch's bf16 hook. Our hook needs no NCCL, so it
# gets another `__name__`. (pickle uses `__qualname__`, which stays.)
bf16_compress_hook.__name__ = "bf16_average_hook"


def fp16_compress_wrapper(hook: Callable[[Any, Any], TensorFuture]) -> Callable[[Any, Any], TensorFuture]:
    """Return a hook that casts the bucket to float16, calls `hook`, and casts the result of `hook` back.

    `hook` gets float16 tensors from the bucket's `buffer()` and `gradients()`. The result of `hook` may have any dtype.

    Returns:
        A new hook. Register the new hook with the state that `hook` needs. The new hook returns a future of the bucket's
        buffer, in the bucket's own dtype.

    Cost: the cost of `hook` on a float16 bucket, and two bytes of extra memory for each element.
    """
    return _with_cast(torch.float16, hook)


def bf16_compress_wrapper(hook: Callable[[Any, Any], TensorFuture]) -> Callable[[Any, Any], TensorFuture]:
    """Return a hook that casts the bucket to bfloat16, calls `hook`, and casts the result of `hook` back.

    See `fp16_compress_wrapper`, which does the same with float16.
    """
    return _with_cast(torch.bfloat16, hook)


def _with_cast(dtype: torch.dtype, hook: Callable[[Any, Any], TensorFuture]) -> Callable[[Any, Any], TensorFuture]:
    if not callable(hook):
        raise InvalidArgumentError(f"expected a hook to wrap, a function hook(state, bucket), found {type(hook).__name__}")

    @communication_hook
    def casting_hook(state: Any, bucket: Bucket) -> TensorFuture:
        buffer = floating_buffer(bucket, f"to cast to {dtype}", may_be_sparse=True)
        # The wrapped hook reads this buffer instead of the bucket's own.
        bucket.set_buffer(buffer.to(dtype))

        def restore(done: TensorFuture) -> torch.Tensor:
            # Put the bucket's own buffer back, because a wrapper around this hook may still use the bucket.
            bucket.set_buffer(buffer)
            return buffer.copy_(_tensor_of(done.value()))

        return hook(state, bucket).then(restore)

    return casting_hook


def _tensor_of(value: Any) -> torch.Tensor:
    # A Work's future holds a list of one tensor.
    result = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    if not isinstance(result, torch.Tensor):
        raise MisuseError(f"expected the wrapped hook's future to hold the reduced bucket, found {type(result).__name__}")
    return result


def _average_as(dtype: torch.dtype, process_group: Any, bucket: Bucket) -> TensorFuture:
    group = group_of(process_group, bucket)
    buffer = floating_buffer(bucket, f"to cast to {dtype}", may_be_sparse=True)
    compressed = buffer.to(dtype)

    def decompress(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        buffer.copy_(done.value()[0])
        return buffer

    return group.all_reduce(compressed, ReduceOp.AVG, async_op=True).get_future().then(decompress)
