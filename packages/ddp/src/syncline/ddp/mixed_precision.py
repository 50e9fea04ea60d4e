"""Mixed precision: separate dtypes for the module's computation, the averaged gradients, and the buffers."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import torch

from syncline.collectives import InvalidArgumentError, ReduceOp
from syncline.reducer import GradBucket

from .low_precision import LowPrecision
from .module_state import ModuleState
from .torch_internals import TorchMixedPrecision


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes in which a wrapped module computes, averages gradients, and keeps buffers. Parameters keep their own dtype.

    Pass a `MixedPrecision` as `DistributedDataParallel(mixed_precision=...)`.

    Args:
        param_dtype: the dtype of the computation. Each forward converts its parameters and inputs to this dtype. Gradients are
            accumulated in the parameters' own dtype. None: no conversion.
        reduce_dtype: gradients are averaged in this dtype. None means `param_dtype`. If `param_dtype` is None, too, gradients
            keep their dtype.
        buffer_dtype: buffers are converted to this dtype permanently. None: no conversion.

    Only floating point tensors are converted. Parameters and buffers that DDP ignores
    (`_set_params_and_buffers_to_ignore_for_model`) are not converted.

    Raises:
        InvalidArgumentError: no dtype was given, or a dtype is not a floating point dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if astuple(self) == (None, None, None):
            raise InvalidArgumentError("expected a dtype in mixed_precision, found none: it would do nothing; leave it out")
        for field in fields(self):
            dtype = getattr(self, field.name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise InvalidArgumentError(f"expected {field.name} to be a floating point dtype, found {dtype}")

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are averaged: `reduce_dtype`, or else `param_dtype`.

        None: gradients are averaged in their own dtype.
        """
        return self.reduce_dtype or self.param_dtype


def as_mixed_precision(given: object) -> MixedPrecision | None:
    """Convert the argument `mixed_precision` of `DistributedDataParallel`.

    Raises:
        InvalidArgumentError: the argument is neither None nor a `MixedPrecision` of Syncline or of torch.
    """
    if isinstance(given, TorchMixedPrecision):
        return MixedPrecision(given.param_dtype, given.reduce_dtype, given.buffer_dtype)
    if given is None or isinstance(given, MixedPrecision):
        return given
    raise InvalidArgumentError(f"expected mixed_precision to be a MixedPrecision, found {type(given).__name__}")


def average_in(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook whose state is `dtype`: average a bucket in this dtype. Complex buckets keep their own dtype.

    Extra memory: a copy of the bucket in this dtype.
    """
    buffer = bucket.buffer()
    if not buffer.is_floating_point():
        work = bucket.process_group().all_reduce(buffer, ReduceOp.AVG, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])  # `value` raises the error of a failed reduction
    work = bucket.process_group().all_reduce(buffer.to(dtype), ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


def lower_precision(config: MixedPrecision | None, state: ModuleState) -> LowPrecision | None:
    """Convert the module's buffers to `config.buffer_dtype`. Return an object that runs the module in `config.param_dtype`.

    Without a `param_dtype`, return None.

    Raises:
        InvalidArgumentError: a gradient is sparse, so it cannot be averaged in another dtype.
    """
    if config is None:
        return None
    if config.wire_dtype is not None and state.sparse_parameters():
        raise InvalidArgumentError(f"mixed_precision averages in {config.wire_dtype} dense gradients only: use sparse=False")
    if config.buffer_dtype is not None:
        for _, buffer in state.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.to(config.buffer_dtype)
    if config.param_dtype is None:
        return None
    return LowPrecision(state, config.param_dtype)
