"""Private parts of torch that ddp uses. The table says what happens if the installed torch lacks a part.

======================================  ==============================================================================
private to torch                        without it
======================================  ==============================================================================
``_execution_engine.queue_callback``    ``mixed_precision`` is an error
``_cast_forward_inputs``                ``mixed_precision`` is an error
``_current_graph_task_id``              ``mixed_precision`` does not notice backwards on two threads
``_get_current_graph_task_keep_graph``  a forward in evaluation mode counts as open until the script drops its loss
``Module._parameters``                  ``mixed_precision`` is an error; ``ModelWatch`` notices some new parameters late
``RNNBase._flat_weights``               ``mixed_precision`` of a module with a recurrent layer is an error
``Tensor._version``                     ``mixed_precision`` compares all low-precision copies after each forward
``Module._modules``                     ``SyncBatchNorm.convert_sync_batchnorm`` is an error; ``ModelWatch`` does not notice
                                        layers that ``insert`` puts into a container
``ProcessGroupGloo.options._threads``   the logging data of DDP lack "gloo_num_threads"
``_to_kwargs``                          the wrapper does not move inputs to the module's GPU, so the script must
``_unsafe_preserve_version_counter``    autograd raises an error if buffers are broadcast between forward and backward
``stateless._functional_call``          parameters of another module in ``functional_call`` are treated as new parameters
``_BatchNorm``, ``_InstanceNorm``       importing the package is an error
``_BufferCommHookLocation``             importing the package is an error
``_MixedPrecision``                     importing the package is an error
``_in_backward_optimizers``             no optimizers of ``_apply_optimizer_in_backward`` are found
======================================  ==============================================================================
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.autograd.grad_mode
import torch.distributed.utils
import torch.nn.parallel.distributed
import torch.nn.utils.stateless
from torch.autograd import Variable

from syncline.collectives import MisuseError
from syncline.collectives.internal import disable_dynamo

BatchNorm = torch.nn.modules.batchnorm._BatchNorm
InstanceNorm = torch.nn.modules.instancenorm._InstanceNorm
BufferCommHookLocation = torch.nn.parallel.distributed._BufferCommHookLocation
TorchMixedPrecision = torch.nn.parallel.distributed._MixedPrecision

# `_apply_optimizer_in_backward` of this module marks parameters by this attribute.
IN_BACKWARD_OPTIMIZERS_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"
IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"

_queue_callback: Callable[[Callable[[], None]], None] | None = getattr(
    getattr(Variable, "_execution_engine", None), "queue_callback", None
)
_cast_forward_inputs: Callable[..., tuple[Any, Any]] | None = getattr(torch.distributed.utils, "_cast_forward_inputs", None)
_current_graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: 0)
_keeps_graph: Callable[[], bool] = getattr(
    getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", lambda: True
)
_to_kwargs: Callable[..., tuple[Any, Any]] | None = getattr(torch.distributed.utils, "_to_kwargs", None)
_preserve: Any = getattr(torch.autograd.grad_mode, "_unsafe_preserve_version_counter", None)
_functional_call: Any = getattr(torch.nn.utils.stateless, "_functional_call", None)
_PRESERVES_SEVERAL = _preserve is not None and "tensors" in inspect.signature(_preserve).parameters


def check_low_precision(modules: Iterable[torch.nn.Module]) -> None:
    """Check that this torch can run modules with low-precision copies in place of their parameters.

    Raises:
        MisuseError: this torch lacks a part. The text names all missing parts.
    """
    lacks = [
        name
        for name, is_there in (
            ("queue_callback", _queue_callback is not None),
            ("_cast_forward_inputs", _cast_forward_inputs is not None),
            ("Module._parameters", all(hasattr(module, "_parameters") for module in modules)),
            (
                "RNNBase._flat_weights",
                all(
                    hasattr(module, "_flat_weights") and hasattr(module, "_flat_weights_names")
                    for module in modules
                    if isinstance(module, torch.nn.RNNBase)
                ),
            ),
        )
        if not is_there
    ]
    if lacks:
        raise MisuseError(
            f"mixed_precision does not work with torch {torch.__version__}, which lacks {', '.join(lacks)}; use torch.autocast"
        )


def gloo_threads(group: object) -> int | None:
    """Return the number of threads that a group of torch uses for Gloo. None if the number is not known."""
    try:
        threads: int = group._get_backend(torch.device("cpu")).options._threads  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None
    return threads


def current_backward() -> int:
    """Return the number of the backward that runs on this thread. A nested backward has its own number."""
    return _current_graph_task_id()


def backward_keeps_graph() -> bool:
    """Whether the backward that runs on this thread has `retain_graph=True`."""
    return _keeps_graph()


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Make autograd call `callback` when the running backward ends.

    The caller must have called `check_low_precision`.
    """
    assert _queue_callback is not None
    _queue_callback(callback)


@disable_dynamo  # a compiler would compile the cast anew for each shape
def cast_inputs(dtype: torch.dtype, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Cast the floating point tensors among a module's arguments.

    The caller must have called `check_low_precision`.
    """
    assert _cast_forward_inputs is not None
    return _cast_forward_inputs(dtype, *inputs, **kwargs)


def moved_to(device: torch.device, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move the tensors among a module's arguments to the device, and return the arguments."""
    # Without the private function, inputs stay where they are.
    if _to_kwargs is None:
        return inputs, kwargs
    (moved, *_), (moved_kwargs, *_) = _to_kwargs(inputs, kwargs, device, False)
    return moved, moved_kwargs


def preserve_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
    """Return a context in which autograd does not see changes of these tensors. Graphs that saved the tensors stay valid."""
    if _preserve is None:
        return nullcontext()
    # Autograd never saves a tensor that was made in inference mode, and counts no writes to it.
    tensors = [tensor for tensor in tensors if not tensor.is_inference()]
    if _PRESERVES_SEVERAL:
        context: AbstractContextManager[object] = _preserve(tuple(tensors))
        return context
    stack = ExitStack()  # torch 2.6 takes one tensor at a time
    for tensor in tensors:
        stack.enter_context(_preserve(tensor))
    return stack


def own_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """Return the module's own dict of its parameters, without those of submodules. Code may write to this dict."""
    return getattr(module, "_parameters", {})


def given_to_functional_call() -> set[int]:
    """Return the `id`s of the tensors that unfinished calls of `torch.func.functional_call` have put into modules.

    Cost: 2 microseconds for a Python stack of 40 frames.
    """
    given: set[int] = set()
    if _functional_call is None:
        return given
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _functional_call.__code__:
            given.update(map(id, frame.f_locals["parameters_and_buffers"].values()))
        frame = frame.f_back
    return given


def refresh_flat_weights(layer: torch.nn.RNNBase) -> None:
    """Update a recurrent layer's own list of parameters."""
    layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]


def was_written(tensor: torch.Tensor) -> bool:
    """Whether code may have written to a tensor since its creation. Do not pass inference tensors."""
    return getattr(tensor, "_version", 1) != 0


def own_children(module: torch.nn.Module) -> dict[str, Any]:
    """Return the module's direct submodules by name. Empty if torch has no `Module._modules`."""
    return getattr(module, "_modules", {})


def own_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the module's own dict of its direct submodules, by name.

    Raises:
        MisuseError: this version of torch has no `Module._modules`.
    """
    if not hasattr(module, "_modules"):
        raise MisuseError(f"layers cannot be replaced with torch {torch.__version__}, which lacks Module._modules")
    return own_children(module)
