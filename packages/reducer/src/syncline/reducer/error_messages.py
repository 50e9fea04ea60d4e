"""Make the reducer's errors, and check gradients."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from syncline.collectives import DisagreementError, MisuseError, SynclineError, TransportError

_MOST_NAMES = 4
_STRAY_BACKWARD = " Did a rank run a backward alone (saliency, an attack)? Run it within no_sync(), or use torch.autograd.grad."


def never_ready(names: Sequence[str], place: str, hint: str) -> MisuseError:
    """Make the error for gradients that are missing at the end of backward."""
    quoted = _quoted(names)
    return MisuseError(f"backward ended on {place}, but these parameters got no gradient in it: {quoted}. {hint}")


def marked_twice(name: str, place: str, hint: str) -> MisuseError:
    """Make the error for a gradient that came after its parameter was ready."""
    return MisuseError(f"the gradient of parameter '{name}' became ready twice in one backward on {place}. {hint}")


def not_expected(name: str, place: str) -> MisuseError:
    """Make the error for a parameter that had no gradient in the first backward with averaging of a static graph."""
    return MisuseError(
        f"found a gradient of parameter '{name}' on {place}, which had none in the first backward that was reduced. "
        "Your training graph has changed in this iteration, so it is not static: pass static_graph=False and "
        "find_unused_parameters=True"
    )


def compiled_autograd(place: str) -> MisuseError:
    """Make the error for a backward that compiled autograd runs."""
    return MisuseError(
        f"a backward began on {place} under compiled autograd, which drops what shall happen at its end: its gradients would "
        "not be averaged. Set torch._dynamo.config.compiled_autograd=False, or compile the forward only: torch.compile(ddp)"
    )


def no_buckets(place: str) -> MisuseError:
    """Make the error for a backward without buckets, because the forward before it failed."""
    return MisuseError(
        f"a backward began on {place}, but the latest forward could not allocate the buckets: see its error, and run forward "
        "again"
    )


def needs_everyone(place: str) -> MisuseError:
    """Make the error for a rank without gradients in the first backward of a static graph."""
    return MisuseError(
        f"shadow_backward on {place}: with static_graph=True every rank must have gradients in the first backward, from which "
        "all ranks learn the graph"
    )


def another_reducer(place: str) -> MisuseError:
    """Make the error for two reducers of the same parameters; see `GradientHooks.take_over`."""
    return MisuseError(
        f"another reducer averages some of the same parameters on {place}, and its forward has had no backward yet: run its "
        "backward first, or close it, or delete its wrapper.\nOn one group their buckets would mix, on groups of other ranks "
        "their averages would differ, and with gradient_as_bucket_view one would read what the other has not averaged to the "
        "end. For one backward of both, give each a group of its own with the same ranks, and neither gradient_as_bucket_view"
    )


def backward_never_ended(what: str, place: str) -> MisuseError:
    """Make the error for a previous backward that has not ended."""
    return MisuseError(
        f"{what} on {place}: the previous backward started to reduce gradients and never ended. Did it raise an error that "
        "was caught? Gradients of this rank may be incomplete: build the model's wrapper, or the DistributedOptimizer, anew, "
        "and close or delete this one"
    )


def wrong_layout(name: str, gradient: torch.Tensor, place: str) -> MisuseError:
    """Make the error for a sparse gradient of a dense parameter, or the opposite."""
    if gradient.layout is torch.strided:
        return MisuseError(
            f"expected a sparse gradient for parameter '{name}' on {place}, found a dense one: the parameter is also used by "
            "a module whose gradients are dense. Use sparse=False in its embedding, or do not announce it as sparse"
        )
    return MisuseError(
        f"expected a dense gradient for parameter '{name}' on {place}, found layout {gradient.layout}: announce it as sparse "
        "(the `sparse` flags of Reducer; DistributedDataParallel announces those of nn.Embedding and nn.EmbeddingBag), or "
        "use sparse=False in that module"
    )


def wrong_dtype(name: str, gradient: torch.Tensor, dtype: torch.dtype, expected: torch.dtype, place: str) -> MisuseError:
    """Make the error for a gradient that has another dtype than its parameter had at construction.

    `dtype` is the present dtype of the parameter, `expected` the dtype at construction.
    """
    found = f"expected a gradient of {expected} for parameter '{name}' on {place}, found {gradient.dtype}"
    if dtype is expected:  # only `grad_dtype` lets a gradient have another dtype than its parameter
        return MisuseError(
            f"{found}: leave its `grad_dtype` unset.\n"
            "  A gradient is averaged in the dtype of its parameter. To add up gradients in a higher precision, give the "
            "parameter this precision, and compute in a lower one: mixed_precision or torch.autocast"
        )
    return MisuseError(
        f"{found}: convert the module before it is wrapped, or wrap it anew.\n"
        "  The bucket was made for the dtype that the parameter had at construction."
    )


def check_gradient(
    name: str,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    expected: torch.dtype,
    place: str,
    *,
    layout: torch.layout = torch.strided,
) -> None:
    """Check that the gradient of a parameter has this dtype and layout.

    Raises:
        MisuseError: the dtype or the layout differs.
    """
    if gradient.layout is not layout:
        raise wrong_layout(name, gradient, place)
    if gradient.dtype is not expected:
        raise wrong_dtype(name, gradient, parameter.dtype, expected, place)


def check_shape(name: str, gradient: torch.Tensor, expected: torch.Size, place: str) -> None:
    """Check that a gradient has this shape.

    Raises:
        MisuseError: the shape differs.
    """
    if gradient.shape != expected:
        raise MisuseError(
            f"expected a gradient of shape {list(expected)} for parameter '{name}' on {place}, found {list(gradient.shape)}: "
            "was the parameter resized? Wrap the module anew"
        )


_AFTER_AVERAGE = (
    "A post-accumulate-grad hook sees this rank's own gradient. To step, clip or log the average, register the hook by "
    "DistributedDataParallel.register_post_average_grad_hook"
)


def gone_before_average(name: str, place: str) -> MisuseError:
    """Make the error for a gradient that a user's hook has dropped."""
    return MisuseError(f"the gradient of parameter '{name}' was gone before it was averaged, on {place}. {_AFTER_AVERAGE}")


def changed_before_average(name: str, place: str) -> MisuseError:
    """Make the error for a parameter that a user's hook has changed before its gradient was averaged."""
    return MisuseError(f"parameter '{name}' was changed before its gradient was averaged, on {place}. {_AFTER_AVERAGE}")


def sees_own_gradients(names: Sequence[str]) -> str:
    """Return the text of a warning: users' hooks on these parameters see gradients before they are averaged."""
    return f"{_shortened(names)}: hooks on the gradient before it is averaged. {_AFTER_AVERAGE}"


def differentiable(name: str) -> MisuseError:
    """Make the error for a sparse gradient that is part of a graph."""
    return MisuseError(
        f"the sparse gradient of parameter '{name}' itself requires a gradient (backward with create_graph=True): use "
        "sparse=False in its embedding, or torch.autograd.grad for the inner derivative, and backward() for the outer one"
    )


def with_parameter_names(error: Exception, names: Sequence[str]) -> SynclineError | None:
    """Return a copy of a transport error or disagreement, with the names of the bucket's parameters in its text.

    The error may be wrapped in a RuntimeError by a future of torch. For any other error, return None.
    """
    told = error if isinstance(error, TransportError | DisagreementError) else _told(error)
    if told is None:
        return None
    # A disagreement already names the calls, so the parameters go in front of them.
    if isinstance(told, DisagreementError):
        return disagreement(told, f"the reduction of the gradients of {_shortened(names, 2)}")
    return told.reworded(f"{told}\n  It was the reduction of the gradients of {_shortened(names)}")


def disagreement(error: DisagreementError, where: str) -> DisagreementError:
    """Return a copy of the error that also says where the ranks disagree, and what to do if only some ranks ran a backward."""
    remedy = _STRAY_BACKWARD if is_of_a_stray_backward(str(error)) else ""
    return error.reworded(f"the ranks disagree in {where}.{remedy}\n{error}")


def is_of_a_stray_backward(text: str) -> bool:
    """Whether an error's text shows a backward that only some ranks ran."""
    marks = set(re.findall(r"backward (\d+) since forward (\d+)", text.partition("The last calls")[0]))
    return len(marks) > 1 or any(backward != "1" for backward, _ in marks)


def _told(error: Exception) -> SynclineError | None:
    # Only a RuntimeError of torch contains the text of another error.
    if not isinstance(error, RuntimeError):
        return None
    known = {kind.__name__: kind for family in (TransportError, DisagreementError) for kind in _family(family)}
    match = re.search(rf"\b({'|'.join(known)}): (.*?)(\n\nAt:\n|$)", str(error), re.DOTALL)
    if match is None:
        return None
    kind = known[match[1]]
    # An error class with attributes cannot be made from a text, so only the text is kept.
    return TransportError(match[2]) if inspect.isfunction(kind.__init__) else kind(match[2])


def _family(kind: type[SynclineError]) -> Iterator[type[SynclineError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)


def not_the_reduced_bucket(result: object, buffer: torch.Tensor, names: Sequence[str]) -> MisuseError | None:
    """Return the error for a hook's result that cannot be the reduced bucket, or None if the result fits."""
    listed = ", ".join(names)
    if not isinstance(result, torch.Tensor):
        return MisuseError(
            f"the communication hook returned a future of {type(result).__name__}; expected the reduced bucket, a tensor of "
            f"{buffer.numel()} elements"
        )
    if result.numel() != buffer.numel():
        return MisuseError(
            f"the communication hook was given a bucket of {buffer.numel()} elements and returned {result.numel()}; it must "
            f"return the whole reduced bucket. Parameters in it: {listed}"
        )
    # A dense bucket is flat, and takes a result of any shape. A sparse bucket is one parameter's gradient.
    if _kind(result) != _kind(buffer):
        return MisuseError(
            f"the communication hook was given a bucket of {_kind(buffer)} and returned one of {_kind(result)}; it must give "
            f"back what it was given: convert in the hook. Parameters in it: {listed}"
        )
    return None


@contextmanager
def naming_parameters(names: Callable[[], Sequence[str]]) -> Iterator[None]:
    """A context that adds the names of the reduced parameters to transport errors and disagreements."""
    try:
        yield
    except Exception as error:
        named = with_parameter_names(error, names())
        if named is None:
            # Any other error, such as an error of a hook, goes on unchanged.
            raise
        # Do not chain an error of Syncline, because the new error contains the whole text of that error.
        raise named from error.__cause__ if isinstance(error, SynclineError) else error


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _shortened(names: Sequence[str], most: int = _MOST_NAMES) -> str:
    if len(names) <= most:
        return _quoted(names)
    return f"{_quoted(names[: most - 1])} and {len(names) - most + 1} more parameters"


def _kind(tensor: torch.Tensor) -> str:
    shape = "" if tensor.layout is torch.strided else f" of shape {list(tensor.shape)}"
    return f"{tensor.dtype}, {str(tensor.layout).removeprefix('torch.')}{shape}, on {tensor.device}"
