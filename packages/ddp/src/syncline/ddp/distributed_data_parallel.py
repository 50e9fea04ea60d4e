"""DistributedDataParallel: the module that keeps its replicas on all ranks equal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.utils import _to_kwargs

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup
from syncline.reducer import GradBucket, IterationStatistics, Reducer

from . import arguments, logging_data
from .compatibility import TorchNames, ignored_names
from .mixed_precision import MixedPrecision, as_mixed_precision, average_in, lower_precision
from .module_state import ModuleState
from .process_groups import default_group, resolve_group

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.nn.parallel.distributed import _MixedPrecision


class DistributedDataParallel(TorchNames, torch.nn.Module):
    """Wraps a module so that each backward averages the gradients over all ranks.

    Every rank builds the same module and wraps it; from then on all have rank 0's parameters and buffers. Each rank feeds its
    own part of the batch. After `loss.backward()` every rank holds bitwise the same gradients: those of the mean of the ranks'
    losses. With equal optimizers the replicas stay equal.

    The arguments are torch's, in torch's order; the README lists where their meaning differs.

    Args:
        module: the module; every parameter that needs a gradient takes part in every backward, unless
            `find_unused_parameters` or `static_graph`.
        device_ids: the module's device, if it is on one that is no CPU: inputs are moved there. None leaves inputs alone.
        output_device: vestigial; None or the same device.
        dim: vestigial; 0.
        broadcast_buffers: give all ranks rank 0's buffers (running statistics, say) at construction and at the start of each
            forward; True if it is None.
        init_sync: compare the ranks' modules at construction and give all rank 0's state. False if they are known to be equal.
        process_group: the ranks, a group of ours or of torch.distributed. None takes our default group, or torch's if only that
            is initialised, or makes ours (`init_process_group()`).
        bucket_cap_mb: gradients are reduced in buckets of about so many MiB, 25 if None; the first one is of 1 MiB at most.
        find_unused_parameters: a backward may leave out parameters, on each rank others. Those that no rank used keep the
            gradients that they have.
        check_reduction: vestigial; every reduction is checked.
        gradient_as_bucket_view: let each `parameter.grad` be a view of its bucket, which saves a copy and as much memory as the
            gradients take. Do not `detach_()` such gradients.
        static_graph: every backward is like the first; allows re-entrant checkpoints and parameters that are never used.
        delay_all_reduce_named_params: refused.
        param_to_hook_all_reduce: refused.
        mixed_precision: compute, reduce, or keep buffers, in a lower precision; a `MixedPrecision`, ours or torch's.
        device_mesh: a one-dimensional mesh, instead of `process_group`.
        skip_all_reduce_unused_params: with `find_unused_parameters`, do not reduce buckets of which no rank uses anything.
        bucket_cap_mb_list: sizes in MiB of the first, second, ... bucket, instead of `bucket_cap_mb`.
        batched_grad_copy: the copies into buckets are batched either way.
        forward_sync_buffers: as `broadcast_buffers`, but buffers are broadcast at construction in any case.

    Constructing it is a collective: an all-gather of 32 bytes and one broadcast of the module's state, in buffers of 250 MiB.

    Raises:
        MisuseError: a parameter is uninitialised or on a device that the group does not serve, or none needs a gradient.
        DisagreementError: on all ranks, if the modules differ between ranks; names the parameter or buffer and both shapes.
        InvalidArgumentError: an argument is refused, or contradicts another; says what to pass instead.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: MixedPrecision | _MixedPrecision | None = None,
        device_mesh: object | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        arguments.check_vestiges(dim, check_reduction)
        arguments.check_not_there(delay_all_reduce_named_params, param_to_hook_all_reduce)
        arguments.check_unused(find_unused_parameters, skip_all_reduce_unused_params, static_graph)
        sync_buffers_at_first, forward_sync_buffers = arguments.buffer_synchronization(broadcast_buffers, forward_sync_buffers)
        self.mixed_precision = as_mixed_precision(mixed_precision)
        self._bucket_caps_bytes = arguments.bucket_caps_bytes(bucket_cap_mb, bucket_cap_mb_list)
        self.parameters_to_ignore = ignored_names(module)
        self._state = ModuleState(module, self.parameters_to_ignore)
        self._is_default_group = process_group is None and device_mesh is None
        self.process_group = resolve_group(process_group, device_mesh)
        parameters = self._state.trainable_parameters(self.process_group)
        self._input_device = arguments.placement(device_ids, output_device, [p for _, p in self._state.parameters()])
        self.module = module
        self.forward_sync_buffers = forward_sync_buffers
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.static_graph = static_graph
        self.batched_grad_copy = batched_grad_copy
        self.dim = dim
        self.device = parameters[0][1].device
        self.device_ids = None if self._input_device is None else [self._input_device.index]
        self.output_device = None if self._input_device is None else self._input_device.index
        if init_sync:
            self._state.verify(self.process_group, buffers=sync_buffers_at_first)
            self._state.broadcast(self.process_group, buffers=sync_buffers_at_first)
        self._low_precision = lower_precision(self.mixed_precision, module, self._state)
        self._buffers_are_stale = True
        self._has_buffers = bool(self._state.buffers())
        self._reducer = self._make_reducer()

    @property
    def broadcast_buffers(self) -> bool:
        """Whether forwards broadcast buffers: the older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    # A compiler, in torch.compile(ddp), gets the module; what is around it communicates and cannot be traced.
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Every rank calls it equally often; it may be a collective.

        In training it prepares the reduction of the gradients. Buffers are broadcast as in torch: before each forward that
        follows one in training.
        """
        inputs, kwargs, will_reduce = self._before_forward(inputs, kwargs)
        outputs = self.module(*inputs, **kwargs) if self._low_precision is None else self._low_precision(inputs, kwargs)
        if will_reduce:
            self._reducer.statistics.forward_ended = time.perf_counter()
        return outputs

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _before_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        """Inputs on their device, and whether gradients will be reduced."""
        if self._buffers_are_stale and self.forward_sync_buffers and self._has_buffers:
            self._state.broadcast_buffers(self.process_group)
        will_reduce = torch.is_grad_enabled() and self._reducer.synchronizes
        if will_reduce:
            self._reducer.prepare_for_backward()
        self._buffers_are_stale = will_reduce
        if self._input_device is not None:
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, self._input_device, False)
            inputs, kwargs = moved[0], moved_kwargs[0]
        return inputs, kwargs, will_reduce

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
        """Let `hook(state, bucket)` reduce each bucket, instead of averaging it. A later call replaces the hook.

        Args:
            state: handed to the hook at every call.
            hook: returns a future of the flat tensor that all ranks shall have. It gets undivided gradients.

        Raises:
            InvalidArgumentError: the hook cannot be called.
            MisuseError: a backward is under way, or has failed; or mixed precision says already how gradients are reduced.
        """
        self._check_no_wire_dtype()
        if not callable(hook):
            raise InvalidArgumentError(f"expected a function hook(state, bucket), found {type(hook).__name__}")
        self._reducer.set_hook(hook, state)

    def iteration_statistics(self) -> IterationStatistics:
        """What happened when in the latest iteration on this rank."""
        return self._reducer.statistics

    def logging_data(self) -> dict[str, int | str]:
        """Arguments, sizes in bytes and the latest iteration's times in nanoseconds, under the names that torch's DDP uses."""
        caps = self._bucket_caps_bytes
        parameters = [parameter for _, parameter in self._state.parameters() if parameter.requires_grad]
        return {
            **logging_data.describe_module(self.module, parameters, self.process_group),
            "device_ids": ", ".join(str(index) for index in self.device_ids or ()),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": caps if isinstance(caps, int) else max(caps),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            **logging_data.describe_buckets(self._reducer),
            **logging_data.describe_iteration(self._reducer.statistics),
        }

    def _make_reducer(self) -> Reducer:
        parameters = self._state.trainable_parameters(self.process_group)
        sparse = self._state.sparse_parameters()
        reducer = Reducer(
            parameters,
            self.process_group,
            bucket_cap_bytes=self._bucket_caps_bytes,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            sparse=[id(parameter) in sparse for _, parameter in parameters],
            find_unused_parameters=self.find_unused_parameters,
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
            static_graph=self.static_graph,
        )
        if self._wire_dtype is not None:
            reducer.set_hook(average_in, self._wire_dtype)
        return reducer

    # ---- mixed precision ----

    @property
    def _wire_dtype(self) -> torch.dtype | None:
        return None if self.mixed_precision is None else self.mixed_precision.wire_dtype

    def _check_no_wire_dtype(self) -> None:
        if self._wire_dtype is not None:
            raise MisuseError(
                f"mixed_precision averages gradients in {self._wire_dtype}, which a communication hook would replace: use only "
                "one of them, such as torch.autocast with a hook that casts"
            )

    # ---- copies ----

    def __getstate__(self) -> dict[str, Any]:
        """All but the group and the reducer, which stay with the process. Hooks are not kept, as in torch."""
        if not self._is_default_group:
            raise MisuseError(
                f"a DistributedDataParallel on {self.process_group.place()} cannot be copied or pickled: only the default "
                "group is found again. Copy or save ddp.module (or its state_dict), and wrap it anew"
            )
        return {name: value for name, value in self.__dict__.items() if name not in ("process_group", "_reducer")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the default group of this process, and build a reducer: a collective, like construction."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self.process_group = default_group()
        self._reducer = self._make_reducer()
