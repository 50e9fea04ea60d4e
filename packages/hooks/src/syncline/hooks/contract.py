"""The contract of a communication hook, for Syncline's DDP and for torch's DDP.

A hook is a function `hook(state, bucket) -> torch.futures.Future[torch.Tensor]`. DDP calls the hook during backward, on every
rank, for the same buckets in the same order. The bucket holds this rank's own gradients, so a hook that averages must divide by
the number of ranks. The future's value is the flat tensor of the reduced gradients.
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
    """The methods that Syncline's GradBucket and torch's GradBucket have in common."""

    def index(self) -> int:
        """The bucket's number, in the order in which the buckets of a backward are reduced."""

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket, in one flat tensor."""

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Make `buffer()` and `gradients()` show another flat tensor with the same number of elements."""

    def gradients(self) -> list[torch.Tensor]:
        """The gradients as views of `buffer()`."""

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of these gradients."""

    def is_last(self) -> bool:
        """Whether this is the last bucket of this backward."""


def communication_hook(hook: Hook) -> Hook:
    """A decorator that lets torch's `register_comm_hook` accept a hook with annotations.

    torch accepts only its own types as annotations, so this decorator hides the annotations. Under torch's DDP, the decorator
    also makes an error of the hook's future visible in C++; see Note [Futures that fail] in `syncline.collectives.work`.
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
    """Return the bucket's buffer, after a check of its dtype and layout.

    `purpose`, such as "to compress", is a part of the error's text.

    Raises:
        MisuseError: the dtype is integer or complex, or the buffer is sparse and `may_be_sparse` is False.
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


def check_state(state: object, expected: type) -> None:
    """Refuse the state of another hook. torch has classes of the same names, so the error shows the module of the class.

    Raises:
        MisuseError: the state is not an `expected`, a class of this package.
    """
    if not isinstance(state, expected):
        raise MisuseError(
            f"expected a {expected.__name__} as the hook's state, found {type(state)}: make one of syncline.hooks"
        )


def names_in(bucket: Bucket) -> list[str] | None:
    """Return the names of `bucket.parameters()` in the model. None under torch's DDP."""
    if isinstance(bucket, dist.GradBucket):
        return None
    names: list[str] | None = bucket.parameter_names()  # type: ignore[attr-defined]  # our GradBucket has it, torch's does not
    return names


def group_of(state: Any, bucket: Bucket) -> ProcessGroup:
    """Return the group over which a hook communicates.

    Args:
        state: a group of Syncline or of torch, or None: the group of Syncline's reducer, or torch's default group.
        bucket: the bucket that the hook got.

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
