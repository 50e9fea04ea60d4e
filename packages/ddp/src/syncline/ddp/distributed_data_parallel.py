"""DistributedDataParallel: the module that keeps its replicas on all ranks equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from syncline.collectives import (
    InvalidArgumentError,
    ProcessGroup,
    get_default_group,
    init_process_group,
    is_initialized,
)
from syncline.reducer import GradBucket, IterationStatistics, Reducer

from .module_state import broadcast_buffers, broadcast_state, trainable_parameters, verify_state

_MIB = 1024 * 1024


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module so that each backward averages the gradients over all ranks.

    Every rank builds the same module and wraps it; from then on all have rank 0's parameters and buffers. Each rank feeds its
    own part of the batch. After `loss.backward()` every rank holds bitwise the same gradients: those of the mean of the ranks'
    losses. With equal optimizers the replicas stay equal.

    Args:
        module: the module; every parameter that needs a gradient takes part in every forward.
        process_group: the ranks; None takes the default group, and makes it (`init_process_group()`) if there is none yet.
        bucket_cap_mb: gradients are reduced in buckets of about so many MiB.
        broadcast_buffers: give all ranks rank 0's buffers (running statistics, say) at the start of each forward.
        gradient_as_bucket_view: let each `parameter.grad` be a view of its bucket, which saves a copy and as much memory as the
            gradients take. Do not `detach_()` such gradients.

    Constructing it is a collective: an all-gather of 32 bytes and one broadcast of the module's state, in buffers of 250 MiB.

    Raises:
        MisuseError: a parameter is uninitialised or on a device that the group does not serve, or none needs a gradient.
        DisagreementError: on all ranks, if the modules differ between ranks; names the parameter or buffer and both shapes.
        InvalidArgumentError: `bucket_cap_mb` is not positive and finite.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < bucket_cap_mb < math.inf:
            raise InvalidArgumentError(f"expected a finite bucket_cap_mb above 0 MiB, found {bucket_cap_mb}")
        group = process_group or _default_group()
        parameters = trainable_parameters(module, group)
        verify_state(module, group)
        broadcast_state(module, group)
        self.module = module
        self.process_group = group
        self.broadcast_buffers = broadcast_buffers
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self._buffers_are_stale = True
        self._has_buffers = any(True for _ in module.buffers())
        self._reducer = Reducer(
            parameters,
            group,
            bucket_cap_bytes=int(bucket_cap_mb * _MIB),
            gradient_as_bucket_view=gradient_as_bucket_view,
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Every rank calls it equally often; it may be a collective.

        In training it prepares the reduction of the gradients. Buffers are broadcast as in torch: before each forward that
        follows one in training.
        """
        if self._buffers_are_stale and self.broadcast_buffers and self._has_buffers:
            broadcast_buffers(self.module, self.process_group)
        will_reduce = torch.is_grad_enabled() and self._reducer.synchronizes
        if will_reduce:
            self._reducer.prepare_for_backward()
        self._buffers_are_stale = will_reduce
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward adds to each rank's own gradients and does not communicate.

        The first forward and backward after it reduce what was added up. The forward must be inside, too. May be nested.
        """
        before = self._reducer.synchronizes
        self._reducer.synchronizes = False
        try:
            yield
        finally:
            self._reducer.synchronizes = before

    def register_comm_hook(self, state: object, hook: Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]) -> None:
        """Let `hook(state, bucket)` reduce each bucket, instead of averaging it.

        Args:
            state: handed to the hook at every call.
            hook: returns a future of the flat tensor that all ranks shall have. It gets undivided gradients.

        Raises:
            InvalidArgumentError: the hook cannot be called.
        """
        if not callable(hook):
            raise InvalidArgumentError(f"expected a function hook(state, bucket), found {type(hook).__name__}")
        self._reducer.set_hook(hook, state)

    def iteration_statistics(self) -> IterationStatistics:
        """What happened when in the latest iteration on this rank."""
        return self._reducer.statistics


def _default_group() -> ProcessGroup:
    return get_default_group() if is_initialized() else init_process_group()
