"""Find torch's built-in communication hooks by their names in `torch.distributed.BuiltinCommHookType`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from syncline.collectives import InvalidArgumentError
from syncline.reducer import GradBucket
from syncline.reducer.bucket_reduction import CommunicationHook

from .mixed_precision import average_in


def builtin_hook(kind: dist.BuiltinCommHookType) -> CommunicationHook | None:
    """Return the hook with this name. None for ALLREDUCE: a plain average needs no hook.

    Raises:
        InvalidArgumentError: no hook has this name.
    """
    if kind == dist.BuiltinCommHookType.ALLREDUCE:
        return None
    if kind == dist.BuiltinCommHookType.FP16_COMPRESS:
        return average_as_float16
    raise InvalidArgumentError(f"expected a BuiltinCommHookType (ALLREDUCE, FP16_COMPRESS), found {kind!r}")


def average_as_float16(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that averages a bucket in float16; see `average_in`."""
    return average_in(torch.float16, bucket)
