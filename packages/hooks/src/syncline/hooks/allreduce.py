"""A hook that averages like DDP without a hook, and a hook that does not communicate."""

from __future__ import annotations

from typing import Any

import torch

from syncline.collectives import ReduceOp

from .contract import Bucket, TensorFuture, communication_hook, group_of


@communication_hook
def allreduce_hook(process_group: Any, bucket: Bucket) -> TensorFuture:
    """Average the bucket over the ranks, in the bucket's dtype and in place. DDP does the same without a hook.

    Args:
        process_group: a group of Syncline or torch; None: the group of the DDP.
        bucket: the gradients.

    Returns:
        A future of the bucket's buffer.

    Cost: one all_reduce of the bucket's bytes, without extra memory.
    """
    group = group_of(process_group, bucket)
    work = group.all_reduce(bucket.buffer(), ReduceOp.AVG, async_op=True)
    # The future of a work holds a list of tensors. The future of a hook must hold one tensor.
    return work.get_future().then(lambda done: done.value()[0])


@communication_hook
def noop_hook(state: Any, bucket: Bucket) -> TensorFuture:
    """Return the bucket unchanged, without communicating. Use this hook only to measure the cost of communication.

    With this hook, gradients are not averaged, so the replicas drift apart.
    """
    future: TensorFuture = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
