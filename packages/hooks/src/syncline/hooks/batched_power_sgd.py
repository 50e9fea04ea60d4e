"""PowerSGD that compresses a whole bucket as one matrix."""

from __future__ import annotations

import math

import torch

from syncline.collectives import ProcessGroup, ReduceOp

from .contract import Bucket, TensorFuture, communication_hook
from .low_precision import math_dtype, plain_math, saturated
from .orthogonalize import orthogonalize
from .power_sgd import run
from .power_sgd_state import PowerSGDState, padding_of
from .stages import Stages, used_here


@communication_hook
def batched_powerSGD_hook(state: PowerSGDState, bucket: Bucket) -> TensorFuture:  # noqa: N802 - torch's name
    """Average the bucket approximately: PowerSGD on the whole bucket as one square matrix, padded with zeros.

    This hook is less accurate than `powerSGD_hook`; use it only if `powerSGD_hook` takes too long. As in torch,
    `min_compression_rate` and `batch_tensors_with_same_shape` have no effect. A bucket with NaN or infinity becomes NaN on
    every rank, and the state drops the bucket's errors and factor.

    Source: see `powerSGD_hook`.

    Args:
        state: the settings, and the errors and factors of earlier steps. A factor belongs to a whole bucket. If DDP divides
            the gradients into other buckets, the new buckets begin with random factors.
        bucket: the gradients, of a floating-point dtype. 16-bit gradients are sent in 16 bits, and computed in float32.

    Returns:
        A future of the bucket's buffer.

    Cost: two all_reduces, each of `side * matrix_approximation_rank` elements. Here `side` is the square root of the bucket's
    number of elements, rounded up.

    Raises:
        MisuseError: the state is not a PowerSGDState. Or the state was saved with another model or another number of ranks. Or
            the bucket holds integers or a sparse gradient.
    """
    return run(state, bucket, _bucketwise)


def _bucketwise(state: PowerSGDState, bucket: Bucket, group: ProcessGroup) -> Stages:
    buffer = bucket.buffer()
    # The square root, rounded up.
    side = math.isqrt(buffer.numel() - 1) + 1
    rank = min(side, state.matrix_approximation_rank)
    layout = padding_of(state.names.of(bucket))
    with plain_math(buffer.device), state.statistics.stage("compress"):
        padded = torch.zeros(side * side, dtype=math_dtype(buffer.dtype), device=buffer.device)
        padded[: buffer.numel()] = buffer
        if state.use_error_feedback:
            state.error_feedback.add_to(*_pieces(state, bucket, padded, layout))
        matrix = padded.view(1, side, side)
        q = orthogonalize(_first_factor(state, layout, side, rank, buffer).unsqueeze(0), state.orthogonalization_epsilon)
        p = torch.bmm(matrix, q)
        wire = saturated(p.reshape(-1), buffer.dtype)
    state.count(bucket, 2 * side * rank)
    yield group.all_reduce(wire, ReduceOp.AVG, async_op=True)
    with plain_math(buffer.device), state.statistics.stage("second factor"):
        used_here([padded])
        # torch adds the epsilon to the norm of a sum over the ranks. Our `p` is a mean, so divide the epsilon, too.
        p = orthogonalize(wire.view(p.shape).to(p.dtype), state.orthogonalization_epsilon / group.size)
        q = torch.bmm(matrix.transpose(1, 2), p)
        wire = saturated(q.reshape(-1), buffer.dtype)
    yield group.all_reduce(wire, ReduceOp.AVG, async_op=True)
    with plain_math(buffer.device), state.statistics.stage("decompress"):
        used_here([p, padded])
        q = wire.view(q.shape).to(q.dtype)
        # A single NaN or infinity makes the sum not finite. `wire` has the same bits on all ranks, so their decisions agree.
        is_sound = bool(torch.isfinite(wire.sum(dtype=q.dtype)))
        approximation = torch.bmm(p, q.transpose(1, 2))
        names, left_out = _pieces(state, bucket, padded.sub_(approximation.view(-1)), layout)
        if state.use_error_feedback and is_sound:
            state.error_feedback.remember(names, left_out)
        elif not is_sound:
            state.error_feedback.forget(names)
        # Without warm start, or after a bad step, the next step begins with a random factor.
        state.factors.pop(layout, None)
        if state.warm_start and is_sound:
            state.factors[layout] = q[0]
        buffer.copy_(saturated(approximation.view(-1)[: buffer.numel()], buffer.dtype))
    return buffer


def _first_factor(state: PowerSGDState, layout: str, side: int, rank: int, buffer: torch.Tensor) -> torch.Tensor:
    factor = state.factors.get(layout) if state.warm_start else None
    # Draw a factor if there is none yet, or if a loaded factor has another shape.
    if factor is None or factor.shape != (side, rank):
        (factor,) = state.random_factors([(side, rank)], buffer, buffer.dtype)
    used_here([factor])
    return factor.to(buffer.device, math_dtype(buffer.dtype))


def _pieces(state: PowerSGDState, bucket: Bucket, padded: torch.Tensor, layout: str) -> tuple[list[str], list[torch.Tensor]]:
    shapes = [parameter.shape for parameter in bucket.parameters()]
    sizes = [shape.numel() for shape in shapes]
    *parts, padding = torch.split(padded, [*sizes, padded.numel() - sum(sizes)])
    # A part keeps the order of the bucket's memory, whatever the parameter's strides are. So each element of an error is later
    # added to the gradient's element at the same position in memory.
    return [*state.names.of(bucket), layout], [*(part.view(s) for part, s in zip(parts, shapes, strict=True)), padding]
