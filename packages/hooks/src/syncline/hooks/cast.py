"""Compression by casting."""

from __future__ import annotations

from typing import Any

import torch

from syncline.collectives import ReduceOp

from .contract import Bucket, TensorFuture, communication_hook, group_of


@communication_hook
def fp16_compress_hook(process_group: Any, bucket: Bucket) -> TensorFuture:
    """Average the bucket in float16, and cast the result back.

    Sums of halves are accumulated in float32 and divided before they are rounded, so a sum beyond float16's 65,504 does no
    harm; a single gradient beyond it becomes infinite.

    Args:
        process_group: a group of ours or torch's; None for the caller's (see `contract.group_of`).
        bucket: the gradients; a floating-point dtype.

    Returns:
        A future of the bucket's buffer.

    Cost: one all_reduce of two bytes for each element; two bytes of extra memory for each element.
    """
    return _average_as(torch.float16, process_group, bucket)


def _average_as(dtype: torch.dtype, process_group: Any, bucket: Bucket) -> TensorFuture:
    group = group_of(process_group, bucket)
    buffer = bucket.buffer()
    compressed = buffer.to(dtype)

    def decompress(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        buffer.copy_(done.value()[0])
        return buffer

    return group.all_reduce(compressed, ReduceOp.AVG, async_op=True).get_future().then(decompress)
