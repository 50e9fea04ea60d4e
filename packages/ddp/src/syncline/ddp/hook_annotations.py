"""Check the type annotations of a communication hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_origin

import torch
import torch.distributed as dist

from syncline.collectives import InvalidArgumentError, InvalidTypeError
from syncline.reducer import GradBucket


def check_hook(hook: Callable[..., Any]) -> None:
    """Check that a hook's type annotations allow a bucket as second argument and a future as result.

    Raises:
        InvalidTypeError: the hook is not callable.
        InvalidArgumentError: an annotation names another class.
    """
    if not callable(hook):
        raise InvalidTypeError(
            f"Communication hook must be callable. Expected a function hook(state, bucket), found {type(hook).__name__}"
        )
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (NameError, TypeError, ValueError, AttributeError, SyntaxError):  # a hook in C, or an annotation with unknown names
        return
    parameters = list(signature.parameters.values())
    if len(parameters) > 1 and _contradicts(parameters[1].annotation, GradBucket, getattr(dist, "GradBucket", GradBucket)):
        raise InvalidArgumentError(
            f"expected a hook(state, bucket: GradBucket), found {parameters[1]}: leave the annotation out, or correct it"
        )
    if _contradicts(signature.return_annotation, torch.futures.Future):
        raise InvalidArgumentError(
            f"expected a hook that returns a torch.futures.Future[torch.Tensor], found {signature.return_annotation}: return "
            "the future of the reduced bucket, such as work.get_future()"
        )


def _contradicts(annotation: Any, *expected: type) -> bool:
    """Whether the annotation excludes all expected types: it is a class, and no expected type is a subclass of it.

    An annotation that is not a class, or that is a protocol, excludes no type.
    """
    kind = get_origin(annotation) or annotation
    if kind in (inspect.Signature.empty, Any) or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return False
    return not any(issubclass(one, kind) for one in expected)
