"""The names that other libraries call on torch's DistributedDataParallel. Nothing of ours calls them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import _BufferCommHookLocation

from syncline.collectives import InvalidArgumentError, ProcessGroup

from .buffers import BufferHook, Buffers
from .builtin_hooks import builtin_hook
from .fused_optimizer import FusedOptimizer
from .module_state import ModuleState

if TYPE_CHECKING:
    from syncline.reducer import Reducer

# How torch says which parameters and buffers a module leaves to itself: attributes of the module, and of each of them.
_NAMES_TO_IGNORE = "_ddp_params_and_buffers_to_ignore"
_IS_IGNORED = "_ddp_ignored"


def ignored_names(module: torch.nn.Module) -> frozenset[str]:
    """What of a module was named to `_set_params_and_buffers_to_ignore_for_model`, ours or torch's."""
    return frozenset(getattr(module, _NAMES_TO_IGNORE, ()))


class TorchNames:
    """A mixin: torch's underscored methods and its switches, in terms of ours."""

    if TYPE_CHECKING:
        process_group: ProcessGroup
        static_graph: bool
        _reducer: Reducer
        _state: ModuleState
        _buffer_sync: Buffers
        fused_optimizer: FusedOptimizer

        def update_process_group(self, process_group: ProcessGroup | dist.ProcessGroup | None) -> None:
            """What `_update_process_group` does."""

        def _check_no_wire_dtype(self) -> None: ...

        def logging_data(self) -> dict[str, int | str]:
            """What `_get_ddp_logging_data` tells."""

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward broadcasts buffers."""
        return self._buffer_sync.are_stale

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._buffer_sync.are_stale = value

    @property
    def _distributed_rank(self) -> int:
        return self.process_group.rank

    def _get_ddp_logging_data(self) -> dict[str, int | str]:
        return self.logging_data()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise InvalidArgumentError(f"expected a sample_rate of at least 1, found {sample_rate}")
        # Every iteration is measured anyway.

    def _set_static_graph(self) -> None:
        if not self.static_graph:
            self._reducer.set_static_graph()
            self.static_graph = True

    def _check_reducer_finalized(self) -> None:
        self._reducer.check_finalized()

    def _remove_autograd_hooks(self) -> None:
        self._reducer.close()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing to set: the model's outputs are handed on as they are."""

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        self._check_no_wire_dtype()
        self._reducer.set_hook(builtin_hook(comm_hook_type))

    def _register_buffer_comm_hook(
        self, state: Any, hook: Any, comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD
    ) -> None:
        follows_forward = comm_hook_location == _BufferCommHookLocation.POST_FORWARD
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
