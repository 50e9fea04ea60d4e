"""Lets torch's tests that need a GPU for each rank run on CPUs: tensors that they put on a GPU stay on the CPU.

Only these are replaced:

* the guards that skip a test if there are fewer GPUs than ranks, or because of the backend's name;
* `Tensor.cuda`, `Tensor.to`, `Module.cuda`, `Module.to` and `device=` of everything that makes tensors: a GPU means the CPU;
* `torch.device(RANK)` in the module of tests: the CPU;
* functions of `torch.cuda` that choose a device, wait for it, or seed it: they do nothing;
* `device_ids` and `output_device` of DistributedDataParallel: None.

A test that needs more (streams, memory of GPUs, other dtypes or algorithms) also fails over Gloo, and we do not count it.
"""

from __future__ import annotations

import functools
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed, common_utils

_CPU = torch.device("cpu")


def run_always(function: Callable[..., Any]) -> Callable[..., Any]:
    """A guard that lets every test pass."""
    return function


# torch's reasons to skip a test that a backend cannot pass on its devices, or that was tried with one backend only.
_ABOUT_BACKENDS = ("Only Nccl", "Only NCCL", "Only MPI", "backend does not support", "Coalescing manager", "in NVIDIA")


def _skip_if(condition: bool, reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A guard that lets the backend try, and skips tests that torch skips for other reasons."""
    return unittest.skipIf(condition and not any(words in reason for words in _ABOUT_BACKENDS), reason)


def neutralise_guards() -> None:
    """Call this before the import of the module of tests, whose decorators run at import."""
    common_distributed.skip_if_no_gpu = run_always
    common_utils.skip_but_pass_in_sandcastle_if = _skip_if
    common_utils.skip_but_pass_in_sandcastle = lambda reason: _skip_if(True, reason)
    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: run_always
    common_distributed.init_multigpu_helper = lambda world_size, _: {rank: [rank] for rank in range(world_size)}


@contextmanager
def cpu_in_place_of_gpu() -> Iterator[None]:
    """A context in which everything for a GPU is on the CPU."""
    calls = {name: getattr(torch.cuda, name) for name in ("set_device", "synchronize", "manual_seed", "current_device")}
    module_to = torch.nn.Module.to
    for name in calls:
        setattr(torch.cuda, name, lambda *_, **__: 0)
    torch.nn.Module.to = _to_cpu(module_to)  # type: ignore[method-assign]
    try:
        with _StayOnCpu():
            yield
    finally:
        torch.nn.Module.to = module_to  # type: ignore[method-assign]
        for name, function in calls.items():
            setattr(torch.cuda, name, function)


class TorchOnCpu(types.ModuleType):
    """The name `torch` in the module of tests, where `torch.device(RANK)` is the CPU; no mode sees that call."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*words: Any, **kwargs: Any) -> torch.device:
        """The device, or the CPU for the number of a GPU."""
        return _CPU if isinstance(words[0], int) else torch.device(*words, **kwargs)


def without_device_ids(wrapper: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A DistributedDataParallel that takes `device_ids`, and leaves the module on the CPU."""

    class OnCpu(wrapper):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
            del device_ids, output_device
            super().__init__(*args, **kwargs)

    OnCpu.__name__ = OnCpu.__qualname__ = wrapper.__name__
    OnCpu.__module__ = torch.nn.parallel.__name__  # it stands in for torch's class there, and pickle looks for it there
    return OnCpu


class _StayOnCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if function is torch.Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:2]), *args[2:])
        return function(*args, **kwargs)


def _on_cpu(place: Any) -> Any:
    """The CPU for a GPU, or for the number of one; anything else unchanged."""
    if isinstance(place, int) and not isinstance(place, bool):
        return _CPU
    if isinstance(place, str) and place.startswith("cuda"):
        return _CPU
    return _CPU if isinstance(place, torch.device) and place.type == "cuda" else place


def _to_cpu(module_to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(module_to)
    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return module_to(module, *map(_on_cpu, args[:1]), *args[1:], **kwargs)

    return to
