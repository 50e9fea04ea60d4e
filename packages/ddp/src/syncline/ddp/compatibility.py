"""Attributes and methods of torch's DDP that other libraries use."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup, broadcast_coalesced
from syncline.collectives.internal import DEFAULT_BUFFER_BYTES

from .buffers import BufferHook, Buffers
from .builtin_hooks import builtin_hook
from .fused_optimizer import FusedOptimizer
from .module_state import ModuleState
from .torch_internals import BufferCommHookLocation

if TYPE_CHECKING:
    from syncline.reducer import Reducer

    from .logging_data import RuntimeSamples
    from .model_watch import ModelWatch

# torch sets the first attribute on the module, and the second one on each parameter or buffer that DDP must ignore.
_NAMES_TO_IGNORE = "_ddp_params_and_buffers_to_ignore"
_IS_IGNORED = "_ddp_ignored"


def ignored_names(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers that DDP must ignore.

    `_set_params_and_buffers_to_ignore_for_model` of Syncline's DDP or of torch's DDP sets these names.
    """
    return frozenset(getattr(module, _NAMES_TO_IGNORE, ()))


class JoinConfig(NamedTuple):
    """The fields of torch's `_join_config`. `enable` says whether the module is inside `join()`."""

    enable: bool
    throw_on_early_termination: bool
    is_first_joinable: bool


class ReducerNames:
    """The attributes of torch's reducer (`ddp.reducer`) that other libraries use."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def prepare_for_forward(self) -> None:
        """Do nothing, because the forward of `DistributedDataParallel` prepares the reducer."""

    def prepare_for_backward(self, tensors: Any) -> None:  # noqa: ARG002 - torch's
        """Make the next backward average gradients. `tensors` has no effect."""
        self._reducer.prepare_for_backward()

    def _rebuild_buckets(self) -> bool:
        """Build the buckets now, if they are due. Return whether this call has built the buckets in the order of the gradients.

        If this call builds buckets, it is a collective.
        """
        return self._reducer.rebuild_buckets()

    def _set_static_graph(self) -> None:
        self._reducer.set_static_graph()

    def _ddp_graph_static(self) -> bool:
        return self._reducer.seems_static

    def _check_reducer_finalized(self) -> None:
        self._reducer.check_finalized()

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        self._reducer.wait_at_end(futures)

    def _remove_autograd_hooks(self) -> None:
        self._reducer.close()


class LoggerNames:
    """The attributes of torch's logger (`ddp.logger`) that other libraries use."""

    def __init__(self, ddp: TorchNames) -> None:
        self._ddp = ddp

    def _get_ddp_logging_data(self) -> LoggerData:
        return LoggerData(self._ddp.logging_data())

    def set_error_and_log(self, error: str) -> None:
        """Store an error, which the logging data then contains."""
        self._ddp._reducer.note_error(RuntimeError(error))


class LoggerData:
    """Logging data as two dictionaries, like torch's: texts and numbers."""

    def __init__(self, data: dict[str, int | str]) -> None:
        self.strs_map = {name: value for name, value in data.items() if isinstance(value, str)}
        self.ints_map = {name: value for name, value in data.items() if isinstance(value, int)}


class TorchNames:
    """A mixin with attributes and methods of torch's DDP. Most of these names are private in torch."""

    if TYPE_CHECKING:
        _group: ProcessGroup
        _join: Any
        _bucket_caps_bytes: list[int]
        _lists_bucket_caps: bool
        _builtin_hook: dist.BuiltinCommHookType | None
        _runtime: RuntimeSamples
        device: torch.device
        find_unused_parameters: bool
        static_graph: bool
        skip_all_reduce_unused_params: bool
        _watch: ModelWatch
        _reducer: Reducer
        _state: ModuleState
        _buffer_sync: Buffers
        fused_optimizer: FusedOptimizer

        def update_process_group(self, process_group: ProcessGroup | dist.ProcessGroup | None) -> None:
            """Average gradients over another group from now on. `_update_process_group` calls this public method."""

        def _check_no_wire_dtype(self) -> None: ...

        def logging_data(self) -> dict[str, int | str]:
            """Return the logging data of torch's DDP. `_get_ddp_logging_data` calls this public method."""

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether buffers may differ between ranks. If True, the next forward with `forward_sync_buffers` makes them equal."""
        return self._buffer_sync.are_stale

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._buffer_sync.are_stale = value

    @property
    def _distributed_rank(self) -> int:
        return self._group.rank

    @property
    def bucket_bytes_cap(self) -> int:
        """The largest size limit of a bucket in bytes."""
        return max(self._bucket_caps_bytes)

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """The size limits in bytes of the first, second, ... bucket. Empty without `bucket_cap_mb_list`."""
        return self._bucket_caps_bytes if self._lists_bucket_caps else []

    @property
    def broadcast_bucket_size(self) -> int:
        """The size in bytes of the buffers that broadcasts of tensors use."""
        return DEFAULT_BUFFER_BYTES

    @property
    def device_type(self) -> str:
        """The type of the module's device."""
        return self.device.type

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The buffers that all replicas keep equal."""
        return [buffer for _, buffer in self._state.buffers()]

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that all replicas keep equal, by name."""
        return dict(self._state.buffers())

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether the buckets are in the order in which gradients arrive. The ZeRO optimizer of torch reads this attribute."""
        return self._reducer.has_rebuilt_buckets

    @property
    def reducer(self) -> ReducerNames:
        """The reducer, with torch's names for its methods."""
        return ReducerNames(self._reducer)

    @property
    def logger(self) -> LoggerNames:
        """The logging data, with torch's names."""
        return LoggerNames(self)

    @property
    def _join_config(self) -> JoinConfig:
        join = self._join
        if join is None:
            return JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)
        return JoinConfig(True, join.throws, join.is_first(self))

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronises buffers."""
        return self._buffer_sync.are_due

    def _sync_buffers(self) -> None:
        self._buffer_sync.broadcast(self._group, 0)

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        buffers = self.modules_buffers if bufs is None else bufs
        self._distributed_broadcast_coalesced(buffers, bucket_size or DEFAULT_BUFFER_BYTES, authoritative_rank)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        detached = [tensor.detach() for tensor in tensors]
        broadcast_coalesced(detached, group=self._group, root=authoritative_rank, buffer_size_bytes=buffer_size)

    def _get_ddp_logging_data(self) -> dict[str, int | str]:
        return self.logging_data()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise InvalidArgumentError(f"expected a sample_rate of at least 1, found {sample_rate}")
        self._runtime.sample_rate = sample_rate

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("the graph is static already: _set_static_graph() changes nothing", stacklevel=2)
            return
        self._reducer.set_static_graph()
        # From here on, later reducers and copies behave as with static_graph=True in the constructor.
        self.static_graph = True
        self.skip_all_reduce_unused_params = False
        self._watch.allows_unused = False

    def _check_reducer_finalized(self) -> None:
        self._reducer.check_finalized()

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Always False. Only torch 2.15 lets the script itself finish a backward."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            raise MisuseError(
                "every backward waits for its gradients at its end: leave out require_manual_backward_finalization and "
                "finalize_backward(), or use torch's DistributedDataParallel"
            )

    @property
    def should_finalize_after_backward(self) -> bool:
        """Always False, because nothing is left to finalize after backward."""
        return False

    def finalize_backward(self) -> None:
        """Raise an error, because every backward ends by itself.

        Raises:
            MisuseError: in every call.
        """
        raise MisuseError("backward has waited for its gradients already: leave out finalize_backward()")

    def _remove_autograd_hooks(self) -> None:
        self._reducer.close()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing, because the model's outputs are never cloned."""

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        self._check_no_wire_dtype()
        self._reducer.set_hook(builtin_hook(comm_hook_type))
        self._builtin_hook = comm_hook_type

    def _register_buffer_comm_hook(
        self, state: Any, hook: Any, comm_hook_location: BufferCommHookLocation = BufferCommHookLocation.POST_FORWARD
    ) -> None:
        follows_forward = comm_hook_location == BufferCommHookLocation.POST_FORWARD
        self._buffer_sync.hook = BufferHook(state, hook, follows_forward)

    def _register_fused_optim(
        self, optim: type[torch.optim.Optimizer], *args: Any, optim_params: Iterable[Any] | None = None, **kwargs: Any
    ) -> None:
        averaged = [parameter for _, parameter in self._state.parameters() if parameter.requires_grad]
        chosen = averaged if optim_params is None else list(optim_params)
        if not {id(parameter) for parameter in chosen} <= {id(parameter) for parameter in averaged}:
            raise InvalidArgumentError(
                "expected parameters in optim_params whose gradients are averaged here, found another one, which would never "
                "be stepped: leave out those that are frozen, ignored or of another module"
            )
        self.fused_optimizer.register(optim, chosen, *args, **kwargs)

    def _update_process_group(self, new_process_group: Any) -> None:
        self.update_process_group(new_process_group)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        setattr(module, _NAMES_TO_IGNORE, params_and_buffers_to_ignore)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                setattr(tensor, _IS_IGNORED, True)

    @staticmethod
    def _get_data_parallel_params(module: torch.nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, _IS_IGNORED):
                yield (name, parameter) if named_params else parameter
