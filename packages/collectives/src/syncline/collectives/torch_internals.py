"""The private parts of torch that the collectives use. The table shows the effect if the installed torch lacks a part.

==================================  ===================================================================================
private to torch                    without it
==================================  ===================================================================================
``torch._C._dynamo.eval_frame``     ``torch.compiler.disable`` takes its place, and loads torch.compile (seconds)
``is_functorch_wrapped_tensor``     for a tensor inside torch.func, the error wrongly says that its memory was freed
``AsyncCollectiveTensor``           a result of torch's functional collectives is an error: pass ``result.wait()``
``FakeTensor``                      a tensor of torch's fake mode is an error
``_len_torch_dispatch_stack``       under torch.distributed, CommDebugMode and make_fx see no collectives
``_resolve_process_group``          under CommDebugMode, make_fx and torch.compile, a collective is an error
``dist.Backend._plugins``           registering our backends is an error
``_world.pg_map``                   ``init_as_mpi`` is an error
``_rendezvous_handlers``            importing ``torch_backend`` after another package took ``mpi://`` is an error of torch
``_shutdown_backend``               nothing changes: torch itself asks each group to end (torch 2.7 and newer)
``ProcessGroupGloo._Options``       the backend ``gloo`` is an error
``options._timeout`` of a group     over a group of torch, the time limit of a call is 30 minutes
``PythonCallbackWork``              the gathers that torch.compile makes for FSDP cannot run over our groups
``_get_tracing_state``              torch.jit.trace makes a program without its collectives
``get_proxy_mode``                  a traced program lacks the collectives for which torch has no operator
``_disable_current_modes``          a mode sees the operators inside a collective for which torch has no operator
``torch._foreach_copy_``            tensors are copied one after the other
``dist.Work._source_rank``          a receive from any rank over a torch group is an error; name the sender
``_cuda_getCurrentRawStream``       a collective on CUDA tensors costs some microseconds more
works that only C++ holds           the group holds each work until somebody waits for the work (torch 2.6)
``dist.Store.clone``                a clone of a torch store uses the same connection as the store (torch 2.6)
``dist.ReduceOp.__getstate__``      a ``premul_sum`` of torch.distributed is an error; use ours
``_profiler_enabled``               a profiler shows no collectives
``_record_function_with_args_*``    a profiler shows collectives without shapes
``_call_end_callbacks_on_jit_fut``  a profiler does not show how long an asynchronous collective took
==================================  ===================================================================================
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch.torch_version import TorchVersion

from .errors import TransportError

P = ParamSpec("P")
T = TypeVar("T")


def _find_eval_frame() -> Any:
    module = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    newer = ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")
    can_skip = hasattr(module, "skip_code") or all(hasattr(module, name) for name in newer)
    return module if can_skip and hasattr(module, "set_eval_frame") else None


# Private names differ between versions of torch, and torch's type information lacks some of these names.
eval_frame: Any = _find_eval_frame()
_foreach_copy: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object] | None = getattr(
    torch, "_foreach_copy_", None
)

#: Whether this tensor is only a wrapper around another tensor, made by a transformation of torch.func such as `vmap`.
is_functorch_wrapped: Callable[[torch.Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda _: False
)


def _distributed() -> Any:
    # Every program that has a group has loaded this module.
    return sys.modules["torch.distributed.distributed_c10d"]


def group_named(name: str) -> object:
    """Return the group of torch.distributed with this name. torch's functional operators take such names as arguments.

    Raises:
        RuntimeError: torch knows no group of this name.
    """
    return _distributed()._resolve_process_group(name)


def register_work(result: torch.Tensor, wait: Callable[[timedelta], bool]) -> None:
    """Make torch's `wait_tensor(result)` call `wait`. torch passes a time limit to `wait`; 0 means no limit."""
    module: Any = sys.modules["torch._C._distributed_c10d"]
    # torch keeps no reference to a Python function here, so `wait` goes into a C++ object.
    module._register_work(result, module.PythonCallbackWork(wait))


def set_group_store(group: object, name: str, store: object) -> None:
    """Tell torch which backend and which store belong to a group."""
    _distributed()._world.pg_map[group] = (name, store)


def rendezvous_handler(scheme: str) -> Callable[..., Any] | None:
    """Return the function that torch calls to connect ranks by a URL of this scheme. None if torch has no such function."""
    # Import the module by its name: the attribute `torch.distributed.rendezvous` is a function.
    module: Any = import_module("torch.distributed.rendezvous")
    handler: Callable[..., Any] | None = getattr(module, "_rendezvous_handlers", {}).get(scheme)
    return handler


def end_groups_by(shut_down: Callable[[Any], bool]) -> None:
    """Make torch's `destroy_process_group` call `shut_down` for each group.

    If `shut_down` returns False, torch ends the group itself. A second call of `end_groups_by` does nothing. If torch has no
    `_shutdown_backend`, `end_groups_by` does nothing.
    """
    module = _distributed()
    theirs = getattr(module, "_shutdown_backend", None)
    if theirs is None or theirs.__module__ == __name__:
        return

    def either(group: Any) -> None:
        if not shut_down(group):
            theirs(group)

    module._shutdown_backend = either


def gloo_options(timeout: timedelta, devices: Sequence[object]) -> Any:
    """Return the options from which torch makes a Gloo group."""
    options = _distributed().ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = list(devices)
    return options


def timeout_of(group: Any) -> float:
    """Return the longest time limit, in seconds, of the backends of a torch group. 0 if no limit can be read."""
    limits_s = []
    for device in getattr(group, "_device_types", ()):
        with suppress(AttributeError, RuntimeError):
            limits_s.append(float(group._get_backend(device).options._timeout.total_seconds()))
    return max(limits_s, default=0.0)


def registered_creator(name: str) -> Callable[..., Any] | None:
    """Return the function that makes groups of the backend `name` of torch.distributed. None if no backend has this name."""
    plugin = _distributed().Backend._plugins.get(name.upper())
    return None if plugin is None else plugin.creator_fn


#: Whether torch's C++ code waits for ever for a work to which no Python code keeps a reference.
LOSES_WORKS = TorchVersion(torch.__version__) < "2.7"


#: How many dispatch modes of torch (`TorchDispatchMode`) see the operators that this thread calls.
modes_active: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


#: The state of torch.jit.trace on this thread; None if torch.jit.trace does not record.
jit_trace: Callable[[], object] = getattr(torch._C, "_get_tracing_state", lambda: None)


def is_traced() -> bool:
    """Whether torch.jit.trace or make_fx records the operators that this thread calls."""
    if jit_trace() is not None:
        return True
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    mode: Callable[[], object] = getattr(proxies, "get_proxy_mode", lambda: None)
    return mode() is not None


def modes_switched_off() -> AbstractContextManager[object]:
    """A context in which no `TorchDispatchMode` of torch sees the operators that this thread calls."""
    switched_off: Callable[[], AbstractContextManager[object]] = getattr(
        torch.utils._python_dispatch, "_disable_current_modes", nullcontext
    )
    return switched_off()


def awaited_value(value: object) -> torch.Tensor | None:
    """Wait for a result of torch's functional collectives, and return its tensor. Return None for other values."""
    kind = _class_if_loaded("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if not isinstance(value, kind):
        return None
    awaited: torch.Tensor = value.trigger_wait()  # type: ignore[attr-defined]  # of torch's private class
    return awaited


def is_fake(value: object) -> bool:
    """Whether this is a FakeTensor: a tensor without values, with which a program computes shapes."""
    return isinstance(value, _class_if_loaded("torch._subclasses.fake_tensor", "FakeTensor"))


def _class_if_loaded(module: str, name: str) -> type | tuple[()]:
    # If the module is not loaded, no object of the class exists.
    found: type | tuple[()] = getattr(sys.modules.get(module), name, ())
    return found


def disable_dynamo(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator that excludes a function, and all functions that it calls, from torch.compile's tracing.

    Unlike `torch.compiler.disable`, this decorator does not load all of torch.compile, which takes seconds.
    """
    # The reducer of torch's DDP issues collectives in the middle of a compiled forward, and the tracer cannot trace a group.
    if eval_frame is None:
        disabled: Callable[P, T] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        tracer = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(tracer)

    _skip(call)  # the functions that `call` calls are not traced, because the tracer is switched off
    return call


def disable_dynamo_here(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator that excludes a function from torch.compile's tracing, but not the functions that it calls.

    Calls of the decorated function do not become slower.
    """
    if eval_frame is None:
        disabled: Callable[P, T] = torch.compiler.disable(function, recursive=False)  # type: ignore[no-untyped-call]
        return disabled
    _skip(function)
    return function


def _skip(function: Any) -> None:
    """Tell torch.compile not to trace this function, neither as a frame of its own nor inside a traced caller."""
    function._torchdynamo_disable = True
    code = function.__code__
    if hasattr(eval_frame, "skip_code"):  # in older versions
        eval_frame.skip_code(code)
        return
    action = eval_frame._FrameAction
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))


def copy_each(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Copy each source to the destination with the same index, in one call of torch if possible."""
    if _foreach_copy is not None:
        # torch refuses destinations that are lazily conjugated or negated, and on CUDA some dtypes, such as uint16.
        with suppress(RuntimeError):
            _foreach_copy(destinations, sources)
            return
    for source, destination in zip(sources, destinations, strict=True):
        destination.copy_(source)


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def handle_of_current_stream(device: torch.device) -> int:
    """The handle (a `cudaStream_t`) of the calling thread's current stream on a CUDA device."""
    if _raw_stream is None or device.index is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(_raw_stream(device.index))


def source_rank(torch_work: Any) -> int:
    """Return the sender's rank after a receive from any rank over torch.distributed.

    Raises:
        TransportError: the installed torch does not tell the sender.
    """
    if not hasattr(torch_work, "_source_rank"):
        raise TransportError(
            f"torch {torch.__version__} does not say which rank a message came from; pass the sender to the receive (src=...)"
        )
    return int(torch_work._source_rank())


def clone_of_store(torch_store: Any) -> Any:
    """Return another object for the same store of torch.distributed, or `torch_store` itself if its class has no `clone`."""
    return torch_store.clone() if hasattr(torch_store, "clone") else torch_store


def premul_factor(torch_op: Any) -> float | None:
    """Return the factor of torch's `premul_sum`. None if the factor cannot be read."""
    try:
        return float(torch_op.__getstate__()[1])
    except (AttributeError, TypeError, ValueError, IndexError):
        return None


#: Whether a profiler runs on this thread. Costs 50 ns.
profiler_runs: Callable[[], bool] = getattr(getattr(torch._C, "_autograd", None), "_profiler_enabled", lambda: False)

_enter_range: Any = getattr(torch.autograd, "_record_function_with_args_enter", None)
_exit_range: Any = getattr(torch.autograd, "_record_function_with_args_exit", None)


class ProfilerRange:
    """A range of torch's profiler, named `title`. It begins at construction, and ends at `end` or `end_elsewhere`.

    If the profiler records shapes, it shows the shapes of `tensors`.
    """

    def __init__(self, title: str, tensors: Sequence[torch.Tensor]) -> None:
        if _enter_range is None:
            self._record: Any = torch.ops.profiler._record_function_enter_new(title, None)
        else:
            self._record = _enter_range(title, *tensors)

    def end(self) -> None:
        """End the range now."""
        if _exit_range is None:
            torch.ops.profiler._record_function_exit._RecordFunction(self._record)
        else:
            _exit_range(self._record)

    def end_elsewhere(self) -> Callable[[], None]:
        """Return a function that ends the range and that any thread may call. If torch cannot do this, end the range now.

        Call the function before the program can stop the profiler. A range that ends later writes to freed memory.
        """
        if not hasattr(torch.ops.profiler, "_call_end_callbacks_on_jit_fut"):
            self.end()
            return lambda: None
        # On any thread, a callback of a future runs with the profiler of the thread that attached the callback.
        over: Any = torch.futures.Future()
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(self._record, over)
        return lambda: over.set_result(None)
