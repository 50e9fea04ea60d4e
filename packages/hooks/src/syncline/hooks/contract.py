"""The hook contract: what a communication hook is given, whoever calls it.

A hook is a function `hook(state, bucket) -> torch.futures.Future[torch.Tensor]`. The caller (our reducer, or torch's) calls it
during backward, on every rank, for the same buckets in the same order. The bucket holds this rank's own gradients, not
divided. The future's value is the flat tensor that every rank shall have: the hook owns the division.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from syncline.collectives import MisuseError, ProcessGroup, as_process_group
from syncline.collectives.internal import future_for_torch

if TYPE_CHECKING:
    TensorFuture: TypeAlias = torch.futures.Future[torch.Tensor]
else:
    TensorFuture = torch.futures.Future

Hook = TypeVar("Hook", bound=Callable[[Any, Any], TensorFuture])


class Bucket(Protocol):
    """What our GradBucket and torch's have in common."""

    def index(self) -> int:
        """The bucket's number."""

    def buffer(self) -> torch.Tensor:
        """All gradients, flat."""

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Let `buffer()` and `gradients()` show another flat tensor with as many elements."""

    def gradients(self) -> list[torch.Tensor]:
        """The gradients as views of `buffer()`."""

    def parameters(self) -> list[torch.Tensor]:
        """Their parameters."""

    def is_last(self) -> bool:
        """Whether no further bucket follows in this backward."""


def communication_hook(hook: Hook) -> Hook:
    """Make a typed hook one that torch's `register_comm_hook` takes, too. A decorator.

    torch compares the annotations that it finds with its own types, as objects. Those of a hook for both callers are neither
    torch's types nor, under `from __future__ import annotations`, objects; so `inspect.signature` shall show none.

    torch's DDP waits in C++ for what the hook returns. It gets a future whose error C++ sees, with the text of ours.
    """

    @functools.wraps(hook)
    def call(state: Any, bucket: Any) -> TensorFuture:
        future = hook(state, bucket)
        return future_for_torch(future, [bucket.buffer()]) if isinstance(bucket, dist.GradBucket) else future

    signature = inspect.signature(hook)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]  # PEP 362
        parameters=bare, return_annotation=inspect.Signature.empty
    )
    return call  # type: ignore[return-value]  # the hook's own signature


def floating_buffer(bucket: Bucket, purpose: str) -> torch.Tensor:
    """The bucket's buffer; `purpose` says in words what it is for.

    Raises:
        MisuseError: it is of integers, or complex, of which a cast would drop the imaginary part.
    """
    buffer = bucket.buffer()
    if not buffer.is_floating_point():
        raise MisuseError(f"expected a bucket of a floating-point dtype {purpose}, found {buffer.dtype}")
    return buffer


def group_of(state: Any, bucket: Bucket) -> ProcessGroup:
    """The group over which a hook communicates.

    Args:
        state: a group of ours, one of torch.distributed's, or None for the group of whoever calls the hook: of our reducer,
            or torch's default group under native DDP.
        bucket: the bucket that the hook was given.

    Raises:
        MisuseError: `state` is something else.
    """
    if isinstance(state, ProcessGroup):
        return state
    if isinstance(state, dist.ProcessGroup):
        return as_process_group(state)
    if state is not None:
        raise MisuseError(
            f"expected the hook's state to be a process group (syncline's or torch's) or None, found {type(state).__name__}"
        )
    if isinstance(bucket, dist.GradBucket):
        return as_process_group(None)
    group = bucket.process_group()  # type: ignore[attr-defined]  # what our GradBucket has and torch's has not
    assert isinstance(group, ProcessGroup)
    return group
