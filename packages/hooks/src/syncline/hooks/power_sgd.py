"""PowerSGD sends a gradient as the two factors of a low-rank approximation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from syncline.collectives import MisuseError, ProcessGroup, ReduceOp

from .allreduce import allreduce_hook
from .contract import Bucket, TensorFuture, check_state, communication_hook, floating_buffer, group_of
from .error_feedback import ErrorFeedback
from .low_precision import math_dtype, plain_math, saturated
from .low_rank import MatrixPlan, plan_matrix
from .orthogonalize import orthogonalize
from .power_sgd_state import PowerSGDState
from .stages import Stages, finished, used_here

if TYPE_CHECKING:
    Algorithm: TypeAlias = Callable[[PowerSGDState, Bucket, ProcessGroup], Stages]
else:
    Algorithm = Callable


@communication_hook
def powerSGD_hook(state: PowerSGDState, bucket: Bucket) -> TensorFuture:  # noqa: N802 - torch's name
    """Average the bucket approximately. Each gradient M becomes P Q^T, by one step of power iteration.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", 2019.

    1. Each gradient is reshaped to a matrix M [first dimension, all other dimensions]. The error of the previous step (see 5)
       is added to M.
    2. P = M Q. Here Q is the previous step's Q or a random Q, with orthonormalised columns.
    3. One all_reduce averages all P, together with the gradients that are not compressed.
    4. The columns of P are made orthonormal. Then Q = M^T P, and a second all_reduce averages all Q.
    5. The gradient becomes P Q^T, with the same bits on all ranks. M - P Q^T is this rank's new error.

    The first `start_powerSGD_iter` steps average without compression. A gradient with NaN or infinity becomes NaN on every
    rank, and the state drops the errors and factors of its bucket. With `find_unused_parameters`, a part of the error is lost
    for a parameter that no rank uses in a step. If a finite number of a float16 gradient or factor becomes larger than
    65,504, the limit of float16, the hook uses this limit. With error feedback, later steps send the rest.

    Args:
        state: the settings, and the errors and factors of earlier steps.
        bucket: the gradients, of a floating-point dtype. 16-bit gradients are sent in 16 bits, and computed in float32.

    Returns:
        A future of the bucket's buffer.

    Cost: two all_reduces (one if nothing is compressed). Together they reduce `(rows + columns) * matrix_approximation_rank`
    elements for each gradient that is compressed, and all elements of each other gradient.

    Raises:
        MisuseError: the state is not a PowerSGDState. Or the state was saved with another model or another number of ranks. Or
            the bucket holds integers or a sparse gradient.
    """
    return run(state, bucket, _layerwise)


def run(state: PowerSGDState, bucket: Bucket, algorithm: Algorithm) -> TensorFuture:
    """Run a PowerSGD hook: the first steps average without compression, and later steps compress.

    `algorithm` is a generator function that compresses a bucket. See Note [Stages] in `stages`.
    """
    check_state(state, PowerSGDState)
    floating_buffer(bucket, "for PowerSGD")
    # Number the parameters in steps without compression, too; see Note [Numbers and a resumed run] in `parameter_names`.
    state.names.of(bucket)
    if not state.compresses:
        state.maybe_increase_iter(bucket)
        return allreduce_hook(state.process_group, bucket)
    group = group_of(state.process_group, bucket)
    state.enter(group)
    # An empty bucket is empty on all ranks, so no rank communicates.
    if bucket.buffer().numel() == 0:
        state.maybe_increase_iter(bucket)
        return finished(bucket.buffer())
    stages = algorithm(state, bucket, group)
    future = state.pipeline.run(stages, group, bucket)
    state.maybe_increase_iter(bucket)
    return future


class _Batch:
    """Gradients of one matrix shape, which one batched call multiplies. Each gradient has its own factors.

    `matrices` has the shape [gradients, rows, columns]. With error feedback, `matrices` becomes the next error.
    """

    def __init__(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], plan: MatrixPlan, feedback: ErrorFeedback | None
    ) -> None:
        self.names = list(names)
        self.plan = plan
        self._gradients = list(gradients)
        self.shapes = [gradient.shape for gradient in gradients]
        self._dtype = math_dtype(gradients[0].dtype)
        matrices = [self._with_error(*member, feedback) for member in zip(names, gradients, strict=True)]
        self.matrices = matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(matrices)

    @property
    def factor_shape(self) -> tuple[int, int, int]:
        return len(self.names), self.plan.columns, self.plan.rank

    def leave_out(self, p: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor]:
        """Subtract P Q^T from the matrices. Returns the remainders, which are the new errors."""
        return list(self.matrices.baddbmm_(p, q.transpose(1, 2), alpha=-1).unbind(0))

    def replace(self, p: torch.Tensor, q: torch.Tensor) -> None:
        first = self._gradients[0]
        # Write the product directly to a single gradient, without a copy.
        if len(self._gradients) == 1 and first.is_contiguous() and first.dtype == self._dtype:
            torch.bmm(p, q.transpose(1, 2), out=first.view(1, self.plan.rows, self.plan.columns))
            return
        for gradient, matrix in zip(self._gradients, torch.bmm(p, q.transpose(1, 2)), strict=True):
            gradient.copy_(saturated(matrix.view(gradient.shape), gradient.dtype))

    def _with_error(self, name: str, gradient: torch.Tensor, feedback: ErrorFeedback | None) -> torch.Tensor:
        matrix = gradient.reshape(self.plan.rows, self.plan.columns)
        if feedback is None:
            # Nothing is subtracted from the matrix later, so it may be a view of the gradient.
            return matrix.to(self._dtype)
        error = feedback.take(name, matrix)
        return matrix.to(self._dtype, copy=True) if error is None else error.to(self._dtype).add_(matrix)


def _layerwise(state: PowerSGDState, bucket: Bucket, group: ProcessGroup) -> Stages:
    buffer, statistics = bucket.buffer(), state.statistics
    with plain_math(buffer.device), statistics.stage("compress"):
        plain, batches = _divided(state, bucket)
        qs = [orthogonalize(q, state.orthogonalization_epsilon) for q in _first_factors(state, batches, buffer.dtype)]
        ps = [torch.bmm(batch.matrices, q) for batch, q in zip(batches, qs, strict=True)]
        wire = _packed([*plain, *ps], buffer.dtype)
    state.count(bucket, wire.numel() + sum(q.numel() for q in qs))
    yield group.all_reduce(wire, ReduceOp.AVG, async_op=True)
    with plain_math(buffer.device), statistics.stage("second factor"):
        used_here([*ps, *(batch.matrices for batch in batches)])
        _unpack(wire, [*plain, *ps])
        # No gradient of this bucket is compressed, so there is no second all_reduce.
        if not batches:
            return buffer
        # torch adds the epsilon to the length of a sum over the ranks. Our `p` is a mean, so the epsilon is divided by the
        # number of ranks, too.
        ps = [orthogonalize(p, state.orthogonalization_epsilon / group.size) for p in ps]
        qs = [torch.bmm(batch.matrices.transpose(1, 2), p) for batch, p in zip(batches, ps, strict=True)]
        wire = _packed(qs, buffer.dtype)
    yield group.all_reduce(wire, ReduceOp.AVG, async_op=True)
    with plain_math(buffer.device), statistics.stage("decompress"):
        used_here([*ps, *qs, *(batch.matrices for batch in batches)])
        _unpack(wire, qs)
        # A single NaN or infinity makes the sum not finite. All ranks have the same bits in `wire`, so they decide in the same
        # way.
        is_sound = bool(torch.isfinite(wire.sum(dtype=math_dtype(buffer.dtype))))
        for batch, p, q in zip(batches, ps, qs, strict=True):
            batch.replace(p, q)
            _remember(state, batch, p, q, is_sound=is_sound)
    return buffer


def _divided(state: PowerSGDState, bucket: Bucket) -> tuple[list[torch.Tensor], list[_Batch]]:
    # Shapes stay in the order in which they first occur, because torch draws its random factors in this order.
    feedback = state.error_feedback if state.use_error_feedback else None
    plain: list[torch.Tensor] = []
    by_shape: dict[MatrixPlan, list[tuple[str, torch.Tensor]]] = {}
    for name, gradient in zip(state.names.of(bucket), bucket.gradients(), strict=True):
        plan = plan_matrix(gradient.shape, state.matrix_approximation_rank, state.min_compression_rate)
        if plan.is_compressed:
            by_shape.setdefault(plan, []).append((name, gradient))
            continue
        # A loaded state may have an error of this gradient: its run had a smaller `min_compression_rate`.
        error = None if feedback is None else feedback.take(name, gradient)
        if error is not None:
            gradient.copy_(saturated(error.to(math_dtype(gradient.dtype)).add_(gradient), gradient.dtype))
        plain.append(gradient)
    batches = []
    for plan, members in by_shape.items():
        for batch in [members] if state.batch_tensors_with_same_shape else [[member] for member in members]:
            batches.append(_Batch([name for name, _ in batch], [gradient for _, gradient in batch], plan, feedback))
    return plain, batches


def _first_factors(state: PowerSGDState, batches: Sequence[_Batch], dtype: torch.dtype) -> list[torch.Tensor]:
    # If at least one gradient of a batch has no factor, all gradients of this batch get new factors.
    missing = [batch for batch in batches if not (state.warm_start and all(name in state.factors for name in batch.names))]
    if missing:
        drawn = state.random_factors([batch.factor_shape for batch in missing], missing[0].matrices, dtype)
        for batch, q in zip(missing, drawn, strict=True):
            state.factors.update(zip(batch.names, q.to(batch.matrices.dtype), strict=True))
    return [_stacked(state, batch) for batch in batches]


def _stacked(state: PowerSGDState, batch: _Batch) -> torch.Tensor:
    members = [state.factors[name] for name in batch.names]
    for name, member in zip(batch.names, members, strict=True):
        if member.shape != batch.factor_shape[1:]:
            raise MisuseError(
                f"the state holds a factor of shape {list(member.shape)} for parameter '{name}', expected "
                f"{list(batch.factor_shape[1:])}: it is the state of another model or of another matrix rank"
            )
    used_here(members)
    return torch.stack([member.to(batch.matrices) for member in members])


def _remember(state: PowerSGDState, batch: _Batch, p: torch.Tensor, q: torch.Tensor, *, is_sound: bool) -> None:
    if state.use_error_feedback and is_sound:
        state.error_feedback.remember(batch.names, batch.leave_out(p, q), batch.shapes)
    for name, factor in zip(batch.names, q, strict=True):
        if state.warm_start and is_sound:
            state.factors[name] = factor
        else:
            # Without warm start, or after a step with NaN or infinity, the next step begins with a random factor.
            state.factors.pop(name, None)


def _packed(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([saturated(tensor.reshape(-1), dtype) for tensor in tensors])


def _unpack(wire: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    pieces = torch.split(wire, [tensor.numel() for tensor in tensors])
    for piece, tensor in zip(pieces, tensors, strict=True):
        tensor.copy_(piece.view(tensor.shape))
