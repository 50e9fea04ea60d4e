"""The names that other libraries call on torch's DistributedDataParallel. Nothing of ours calls them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup

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
        _buffers_are_stale: bool

        def _check_no_wire_dtype(self) -> None: ...

        def logging_data(self) -> dict[str, int | str]:
            """What `_get_ddp_logging_data` tells."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next forward prepares a reduction; False within `no_sync()`."""
        return self._reducer.synchronizes

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._reducer.synchronizes = value

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward broadcasts buffers."""
        return self._buffers_are_stale

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._buffers_are_stale = value

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
        if comm_hook_type != dist.BuiltinCommHookType.ALLREDUCE:
            raise MisuseError(
                f"built-in hook {comm_hook_type}: not there; use register_comm_hook(None, syncline.hooks.fp16_compress_hook)"
            )
        self._check_no_wire_dtype()
        self._reducer.set_hook(None)

    def _register_buffer_comm_hook(self, *_: object, **__: object) -> NoReturn:
        raise _not_there("_register_buffer_comm_hook", "pass broadcast_buffers=False and synchronise buffers in the loop")

    def _register_fused_optim(self, *_: object, **__: object) -> NoReturn:
        raise _not_there("_register_fused_optim", "step the optimizer after backward")

    def _update_process_group(self, *_: object, **__: object) -> NoReturn:
        raise _not_there("_update_process_group", "wrap the bare module anew, with the new group")

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


def _not_there(what: str, replacement: str) -> MisuseError:
    return MisuseError(f"{what}: not there yet; {replacement}")
