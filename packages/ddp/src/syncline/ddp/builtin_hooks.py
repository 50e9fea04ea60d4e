"""torch's built-in communication hooks, by the names of `torch.distributed.BuiltinCommHookType`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from syncline.collectives import InvalidArgumentError
from syncline.reducer import GradBucket
from syncline.reducer.bucket_reduction import CommunicationHook

from .mixed_precision import average_in


def builtin_hook(kind: dist.BuiltinCommHookType) -> CommunicationHook | None:
    """The hook of this name; None for plain averaging, which needs no hook.

    Raises:
        InvalidArgumentError: there is none of this name.
    """
    if kind == dist.BuiltinCommHookType.ALLREDUCE:
        return None
    if kind == dist.BuiltinCommHookType.FP16_COMPRESS:
        return average_as_float16
    raise InvalidArgumentError(f"expected a BuiltinCommHookType (ALLREDUCE, FP16_COMPRESS), found {kind!r}")


def average_as_float16(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket as halves. This layer knows no package of hooks; there are more of the kind in `syncline.hooks`."""
    return average_in(torch.float16, bucket)
