"""The hook contract: the arguments and the result of a communication hook, for Syncline's DDP and for torch's DDP.

A hook is a function `hook(state, bucket) -> torch.futures.Future[torch.Tensor]`. Syncline's reducer or
torch's reducer calls the hook during backward, on every rank, for the same buckets in the same order. The bucket holds this
rank's own gradients. Nobody else divides by the number of ranks, so a hook that averages must divide. The future's value is the
flat tensor of the reduced gradients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from syncline.collectives import MisuseError, NonMember, ProcessGroup, as_process_group
from syncline.collectives.internal import future_for_torch

if TYPE_CHECKING:
    TensorFuture: TypeAlias = torch.futures.Future[torch.Tensor]
else:
    TensorFuture = torch.futures.Future

Hook = TypeVar("Hook", bound=Callable[[Any, Any], TensorFuture])


class Bucket(Protocol):
    """The methods that both Syncline's GradBucket and torch's GradBucket have."""

    def index(self) -> int:
        """The bucket's number, counted from 0 in the order in which the buckets of a backward are reduced."""

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket, in one flat tensor."""

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Let `buffer()` and `gradients()` show another flat tensor with the same number of elements."""

    def gradients(self) -> list[torch.Tensor]:
        """The gradients as views of `buffer()`."""

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of these gradients."""

    def is_last(self) -> bool:
        """Whether no further bucket follows in this backward."""


def communication_hook(hook: Hook) -> Hook:
    """A decorator that lets torch's `register_comm_hook` accept a hook with annotations.

    torch compares the hook's annotations with torch's types, by identity. A hook that also runs under Syncline's DDP has other
    annotations. Also, `from __future__ import annotations` turns annotations into strings. So `inspect.signature` must show no
    annotations.

    torch's DDP waits in C++ for the hook's future. So under torch's DDP the hook returns a future whose error C++ can see. This
    error has the text of the hook's error. See Note [Futures that fail] in `syncline.collectives.work`.
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


def floating_buffer(bucket: Bucket, purpose: str, *, may_be_sparse: bool = False) -> torch.Tensor:
    """The bucket's buffer, which must be dense and have a floating-point dtype.

    Args:
        bucket: the bucket.
        purpose: what the buffer is needed for, for the error's text. An example is "to compress".
        may_be_sparse: also accept the buffer of a sparse gradient, which is a sparse tensor.

    Raises:
        MisuseError: the dtype is integer or complex, or the buffer is sparse and `may_be_sparse` is False. (A cast would drop
            the imaginary part of complex numbers.)
    """
    buffer = bucket.buffer()
    if not buffer.is_floating_point():
        raise MisuseError(f"expected a bucket of a floating-point dtype {purpose}, found {buffer.dtype}")
    if buffer.layout != torch.strided and not may_be_sparse:
        raise MisuseError(
            f"expected a dense gradient {purpose}, found a sparse one of shape {list(buffer.shape)}; use allreduce_hook, or "
            "make the layer with sparse=False"
        )
    return buffer


def names_in(bucket: Bucket) -> list[str] | None:
    """The names that `bucket.parameters()` have in the model. None under torch's DDP, whose buckets do not know the names."""
    if isinstance(bucket, dist.GradBucket):
        return None
    names: list[str] | None = bucket.parameter_names()  # type: ignore[attr-defined]  # our GradBucket has it, torch's does not
    return names


def group_of(state: Any, bucket: Bucket) -> ProcessGroup:
    """The group over which a hook communicates.

    Args:
        state: a group of Syncline, a group of torch.distributed, or None. If Syncline's reducer runs the hook, None means the
            reducer's group. If torch's DDP runs the hook, None means torch's default group.
        bucket: the bucket that the hook was given.

    Raises:
        MisuseError: `state` is neither a group nor None, or this rank is not in the group.
    """
    if isinstance(state, ProcessGroup):
        return state
    if isinstance(state, dist.ProcessGroup):
        return as_process_group(state)
    # A rank outside of a group holds a `NonMember`, whose error names the group's ranks.
    NonMember.refuse(state)
    if state is not None:
        raise MisuseError(
            f"expected the hook's state to be a process group (syncline's or torch's) or None, found {type(state).__name__}"
        )
    # torch's bucket does not know its group, so use torch's default group.
    if isinstance(bucket, dist.GradBucket):
        return as_process_group(None)
    group = bucket.process_group()  # type: ignore[attr-defined]  # our GradBucket has it, torch's does not
    assert isinstance(group, ProcessGroup)
    return group
