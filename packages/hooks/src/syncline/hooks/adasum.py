"""A hook that combines gradients by Adasum."""

from __future__ import annotations

from typing import Any

from syncline.collectives import adasum_coalesced

from .contract import Bucket, TensorFuture, communication_hook, floating_buffer, group_of
from .stages import finished


@communication_hook
def adasum_hook(process_group: Any, bucket: Bucket) -> TensorFuture:
    """Combine the gradients of all ranks by Adasum, separately for each parameter.

    Orthogonal gradients are added up, and equal gradients are averaged. So do not multiply the learning rate by the number of
    ranks.

    Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.

    Args:
        process_group: a group of Syncline or torch; None: the group of the DDP.
        bucket: the gradients, dense and of a floating-point dtype.

    Returns:
        A future of the bucket's buffer, complete when the hook returns. So communication does not overlap with backward.

    Cost, for p ranks: log2(p) exchanges of the bucket between two ranks, and two more if p is not a power of two. Extra memory:
    two buckets, and three copies in float64 of one parameter's gradient.
    """
    buffer = floating_buffer(bucket, "for Adasum")
    adasum_coalesced(bucket.gradients(), group_of(process_group, bucket))
    return finished(buffer)
