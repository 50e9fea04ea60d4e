"""Check and convert the arguments of DistributedDataParallel."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from syncline.collectives import InvalidArgumentError

AUTO = "auto"

_MIB = 1024 * 1024
_DEFAULT_CAPS_MB = (1.0, 25.0)  # the first bucket (small, so that communication starts early), and all other buckets
_AUTO_HINT = f'; bucket_cap_mb="{AUTO}" finds one'


def check_module(module: object) -> None:
    """Check that the argument is a module.

    Raises:
        InvalidArgumentError: the argument is not a module.
    """
    if isinstance(module, torch.nn.Module):
        return
    if isinstance(module, type) and issubclass(module, torch.nn.Module):
        name = module.__name__
        raise InvalidArgumentError(f"expected a module, found the class {name}: construct it first, {name}(...)")
    raise InvalidArgumentError(f"expected a torch.nn.Module, found {type(module).__name__}")


def bucket_caps_bytes(bucket_cap_mb: float | str | None, bucket_cap_mb_list: Sequence[float] | None) -> list[int]:
    """Return the size limits in bytes of the first, second, ... bucket. The last limit also applies to all further buckets.

    Raises:
        InvalidArgumentError: the script passed both `bucket_cap_mb` and `bucket_cap_mb_list`, or an empty list. Or a size is
            not a finite number above 0.
    """
    if bucket_cap_mb_list is not None:
        if bucket_cap_mb is not None:
            raise InvalidArgumentError("expected bucket_cap_mb or bucket_cap_mb_list, found both: one would be ignored")
        if len(bucket_cap_mb_list) == 0:  # an array has no truth value
            raise InvalidArgumentError("expected at least one size in bucket_cap_mb_list, found none")
        return [_bytes("bucket_cap_mb_list", cap_mb) for cap_mb in bucket_cap_mb_list]
    caps_mb = _DEFAULT_CAPS_MB if bucket_cap_mb is None else (bucket_cap_mb,)
    return [_bytes("bucket_cap_mb", cap_mb) for cap_mb in caps_mb]


def tunes_buckets(bucket_cap_mb: object, bucket_cap_mb_list: Sequence[float] | None) -> bool:
    """Whether the script passed `bucket_cap_mb="auto"`, without `bucket_cap_mb_list`."""
    return isinstance(bucket_cap_mb, str) and bucket_cap_mb == AUTO and bucket_cap_mb_list is None


def buffer_synchronization(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Return two flags: whether to broadcast buffers at construction, and whether to broadcast buffers before forwards.

    As in torch, `broadcast_buffers=False` sets both flags to False. `forward_sync_buffers=False` sets only the second flag to
    False. If the script passes both arguments, `broadcast_buffers` has no effect.
    """
    # `broadcast_buffers` is older than `forward_sync_buffers`. Scripts may still pass it.
    if broadcast_buffers is not None:
        warnings.warn(
            "broadcast_buffers is deprecated, as in torch: pass forward_sync_buffers, which counts if both are given. With "
            "forward_sync_buffers=False buffers are still broadcast at construction; to keep each rank's own from the start, "
            "broadcast_buffers=False stays the way",
            FutureWarning,
            stacklevel=4,
        )
    if forward_sync_buffers is None:
        both = broadcast_buffers is None or broadcast_buffers
        return bool(both), bool(both)
    return True, bool(forward_sync_buffers)


def check_lazy_bucket_allocation(lazy_bucket_allocation: bool) -> None:
    """Warn if `lazy_bucket_allocation` is True, because it has no effect."""
    if lazy_bucket_allocation:
        warnings.warn("lazy_bucket_allocation=True saves no memory: buckets are kept between backwards", stacklevel=4)


def check_deprecated(dim: int, check_reduction: bool) -> None:
    """Check the deprecated arguments `dim` and `check_reduction`. `check_reduction=True` causes a warning.

    Raises:
        InvalidArgumentError: `dim` is not 0.
    """
    if dim != 0:
        raise InvalidArgumentError(
            f"expected dim=0, found {dim}: no input is split here, each rank feeds its own part of the batch, along whatever "
            "dimension. Leave dim out"
        )
    if check_reduction:
        warnings.warn("check_reduction=True: leave it out, every reduction is always checked", FutureWarning, stacklevel=4)


def delayed_names(
    delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None,
    param_to_hook_all_reduce: torch.nn.Parameter | None,
    trainable: Sequence[tuple[str, torch.nn.Parameter]],
) -> tuple[list[str], str | None]:
    """Return the names of the delayed parameters, and the name of the parameter whose gradient must come first.

    If the script delays no parameter, the result is ([], None).

    Raises:
        InvalidArgumentError: the script passed only one of `delay_all_reduce_named_params` and `param_to_hook_all_reduce`. Or a
            parameter is not a trainable parameter of the module.
    """
    delayed = list(delay_all_reduce_named_params or ())
    if bool(delayed) != (param_to_hook_all_reduce is not None):
        raise InvalidArgumentError(
            "expected delay_all_reduce_named_params together with param_to_hook_all_reduce, found one without the other"
        )
    if param_to_hook_all_reduce is None:
        return [], None
    name_of = {id(parameter): name for name, parameter in trainable}
    for name, parameter in [*delayed, ("param_to_hook_all_reduce", param_to_hook_all_reduce)]:
        if id(parameter) not in name_of:
            raise InvalidArgumentError(
                f"expected trainable parameters of the module, found '{name}', which is none or is ignored: take them from "
                "module.named_parameters()"
            )
    return [name_of[id(parameter)] for _, parameter in delayed], name_of[id(param_to_hook_all_reduce)]


def placement(device_ids: Sequence[Any] | None, output_device: Any, parameters: Sequence[torch.Tensor]) -> torch.device | None:
    """Return the device to which forwards move their inputs. None: inputs stay on their devices.

    Raises:
        InvalidArgumentError: `device_ids` is given for a module on the CPU or on several devices. Or `device_ids` does not name
            the module's only device. Or `output_device` is another device, or is given without `device_ids`.
    """
    devices = sorted({str(parameter.device) for parameter in parameters})
    # An empty list means the same as None, as in torch. An array has no truth value.
    if device_ids is None or len(device_ids) == 0:
        if output_device is not None:
            raise InvalidArgumentError("output_device without device_ids: leave it out, outputs stay where they were made")
        return None
    if len(device_ids) != 1 or len(devices) != 1 or devices == ["cpu"]:
        raise InvalidArgumentError(
            f"expected device_ids=None, or one device for a module that is on it, found device_ids={list(device_ids)} and a "
            f"module on {', '.join(devices)}"
        )
    wanted = _as_device(device_ids[0], parameters[0].device)
    if wanted != parameters[0].device or (output_device is not None and _as_device(output_device, wanted) != wanted):
        raise InvalidArgumentError(
            f"expected device_ids and output_device to name the module's device, {parameters[0].device}, found "
            f"device_ids={list(device_ids)} and output_device={output_device}"
        )
    return wanted


def _as_device(given: Any, like: torch.device) -> torch.device:
    # `like` is the module's only device, so a type without an index (torch.device("cuda")) can only mean this device.
    if isinstance(given, numbers.Integral):
        return torch.device(like.type, int(given))
    device = torch.device(given)
    return like if str(device) == like.type else device


def _is_number(given: object) -> bool:
    # In Python True is a number, but it is not a size.
    return isinstance(given, numbers.Real) and not isinstance(given, bool)


def _bytes(argument: str, cap_mb: float | str) -> int:
    if not _is_number(cap_mb) or isinstance(cap_mb, str):
        raise InvalidArgumentError(f"expected {argument} to be a number of MiB, found {cap_mb!r}{_AUTO_HINT}")
    if not 0 < cap_mb < math.inf:
        raise InvalidArgumentError(f"expected a finite {argument} above 0 MiB, found {cap_mb}")
    return int(float(cap_mb) * _MIB)  # a product of a small NumPy number would overflow
