"""Checks of a collective's arguments. Most functions return a problem as text for an error, or None if there is none."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

from ..engine.call import tensor_in_words
from ..errors import InvalidArgumentError
from ..reduce_op import PremulSum, ReduceOp
from ..torch_internals import awaited_value, is_fake, is_functorch_wrapped
from .layout import overlaps_itself

# Nearly all arguments have one of these types, and need neither `resolved` nor `has_fakes`.
_USUAL = frozenset({torch.Tensor, torch.nn.Parameter, ReduceOp, PremulSum, int, bool, str, type(None)})


def are_usual(values: Iterable[object]) -> bool:
    """Whether all arguments, and all entries of lists and tuples among them, are of types such as `torch.Tensor` or `int`.

    If true, the caller need not call `resolved` and `has_fakes` for these arguments. A tensor of a subclass gives False.
    """
    for value in values:
        kind = type(value)
        if kind in _USUAL:
            continue
        if kind is not list and kind is not tuple:
            return False
        for entry in value:  # type: ignore[attr-defined]  # it is a list or a tuple
            if type(entry) not in _USUAL:
                return False
    return True


def resolved(value: Any) -> Any:
    """Replace each `AsyncCollectiveTensor` in an argument by the tensor for which it stands.

    Note [Tensors that are no memory]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A tensor whose class overrides `__torch_dispatch__` has no memory of its own.

    1. An `AsyncCollectiveTensor`, the result of a functional collective of torch, stands for the tensor that the collective
       writes. This function waits for the collective, and returns that tensor.
    2. With a `FakeTensor`, the program only computes shapes. The collective ends at once, without communication, because other
       ranks may not call it at all (see `engine.observers.public_call`).
    3. `no_memory` refuses tensors of other such classes, for example `DTensor`, tensors inside transformations of `torch.func`,
       and tensors whose memory was freed.
    """
    if isinstance(value, list | tuple):
        return [resolved(entry) for entry in value]
    awaited = awaited_value(value)
    return value if awaited is None else resolved(awaited)


def has_fakes(values: Sequence[object]) -> bool:
    """Whether the arguments, or lists among them, hold a FakeTensor."""
    return any(has_fakes(value) if isinstance(value, list | tuple) else is_fake(value) for value in values)


_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def is_plain(tensor: torch.Tensor, device_types: frozenset[str]) -> bool:
    """Whether a quick test shows that `unusable` and `unwritable` would find no problem."""
    return (
        type(tensor) in _PLAIN_TYPES
        and ("cpu" if tensor.is_cpu else tensor.device.type) in device_types
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and _has_memory(tensor)
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        # An empty tensor may have no address.
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # inside a transformation of torch.func
        return False


def no_memory(tensor: torch.Tensor) -> str | None:
    """Return an error text if there is no memory at the tensor's address; see Note [Tensors that are no memory]."""
    kind = type(tensor)
    if is_lazy(tensor):
        return f"expected a tensor, found {kind.__name__}, which has no shape yet; run a forward first"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"expected a plain tensor, found {kind.__name__}, whose values lie elsewhere; pass the tensor that it is made of "
            "(of a DTensor to_local())"
        )
    if tensor.is_nested:
        return "expected a tensor of one shape, found a nested tensor; pass its values, or to_padded_tensor()"
    # `unusable` refuses sparse and meta tensors, and its error names their layout or device.
    if tensor.layout is not torch.strided or tensor.is_meta or _has_memory(tensor):
        return None
    if is_functorch_wrapped(tensor):
        return (
            "found a tensor inside a transformation of torch.func (such as grad or vmap), which has no memory of its own; "
            "communicate outside of the transformation"
        )
    return (
        "the tensor has no memory: its storage was freed (resize_(0)), or it is one of autograd's zero tensors; allocate it "
        "first, or pass tensor.clone()"
    )


def is_integer(value: object) -> bool:
    """Whether `value` is an integer of Python or of another library. 1.0 is not an integer."""
    # Tensors and arrays have `__index__`, too, but it fails for floats and for more than one element.
    try:
        operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without memory
        return False
    return True


def is_list_of_integers(value: object) -> bool:
    """Whether `value` is a list in the sense of `is_list`, and holds only integers."""
    return is_list(value) and all(map(is_integer, cast(Sequence[object], value)))


def is_list(value: object, kind: type = object) -> bool:
    """Whether `value` has a length and indexed entries, all of type `kind`. A tensor or a text is not a list here."""
    if isinstance(value, torch.Tensor | str | bytes | Mapping):
        return False
    # Do not test for `Sequence`: torch's ParameterList and numpy's arrays are lists, too, but not derived from `Sequence`.
    try:
        len(value)  # type: ignore[arg-type]  # an array of NumPy without a dimension has `__len__`, but no length
    except TypeError:
        return False
    if not hasattr(value, "__getitem__"):
        return False
    return kind is object or all(isinstance(entry, kind) for entry in cast(Sequence[object], value))


def no_tensors(call_arguments: Mapping[str, object], *, only_on_root: str | None = None) -> str | None:
    """Return an error text if an argument is not a tensor. An argument whose name ends in "s" must be a list of tensors.

    The argument with the name `only_on_root` may be None.
    """
    for name, given in call_arguments.items():
        if given is None and name == only_on_root:
            continue
        if name.endswith("s"):
            if not is_list(given):
                return f"expected {name} to be a list of tensors, found {type(given).__name__}"
            for index, entry in enumerate(cast(Sequence[object], given)):
                if not isinstance(entry, torch.Tensor):
                    return f"expected {name} to be a list of tensors, found {type(entry).__name__} at index {index}"
        elif not isinstance(given, torch.Tensor):
            return f"expected {name} to be a torch.Tensor, found {type(given).__name__}"
    return None


def refuse_no_tensors(collective: str, place: str, **call_arguments: object) -> None:
    """Raise an error if `no_tensors` finds a problem in the arguments. `collective` and `place` are for the message.

    Raises:
        InvalidArgumentError: an argument is not a tensor, or not a list of tensors.
    """
    problem = no_tensors(call_arguments)
    if problem is not None:
        raise InvalidArgumentError(f"{collective} on {place}: {problem}")


def unusable(tensor: torch.Tensor, device_types: frozenset[str], backend_name: str) -> str | None:
    """Return an error text if a group with this backend and these `device_types` can neither read nor write the tensor."""
    if not isinstance(tensor, torch.Tensor):  # an unchecked caller may pass anything
        return f"expected a torch.Tensor, found {type(tensor).__name__}"  # type: ignore[unreachable]
    problem = no_memory(tensor)
    if problem is not None:
        return problem
    problem = elsewhere(tensor, device_types, backend_name)
    if problem is not None:
        return problem
    if tensor.layout is not torch.strided:
        return f"expected a dense tensor, found layout {tensor.layout}"
    return None


def elsewhere(tensor: torch.Tensor, device_types: frozenset[str], backend_name: str) -> str | None:
    """Return an error text if the tensor is on another type of device than a group with this backend serves."""
    if tensor.device.type in device_types:
        return None
    served = ", ".join(sorted(device_types))
    return (
        f"backend '{backend_name}' moves tensors on {served}, found a tensor on {tensor.device}; move the tensor, or "
        "choose a backend for that device"
    )


def unwritable(tensor: torch.Tensor) -> str | None:
    """Return an error text if several elements of the tensor share one place in memory."""
    if not tensor.is_contiguous() and overlaps_itself(tensor.shape, tensor.stride()):
        return (
            "the tensor would be written, but several of its elements share one place in memory (strides "
            f"{tuple(tensor.stride())}, as after expand()); pass tensor.contiguous()"
        )
    return None


def not_one_each(what: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, size: int) -> str | None:
    """Return an error text if a list does not have one tensor for each rank, each with the shape and dtype of `like`."""
    if len(tensors) != size:
        return f"expected {size} {what} tensors, one for each rank, found {len(tensors)}"
    for index, tensor in enumerate(tensors):
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            return (
                f"expected {what} {index} to be {tensor_in_words(like)} as the other side is, found {tensor_in_words(tensor)}"
            )
    return None


def not_one_each_like(what: str, tensors: Sequence[torch.Tensor], mine: torch.Tensor, rank: int, size: int) -> str | None:
    """Return an error text if a list does not have one tensor for each rank, each with the dtype of `mine`.

    The tensor at index `rank` must also have the shape of `mine`.
    """
    if len(tensors) != size:
        return f"expected {size} {what} tensors, one for each rank, found {len(tensors)}"
    for index, tensor in enumerate(tensors):
        if tensor.dtype != mine.dtype or (index == rank and tensor.shape != mine.shape):
            return (
                f"expected {what} {index} to be {tensor_in_words(mine)} as the other side is, found {tensor_in_words(tensor)}"
            )
    return None


def not_times(large: torch.Tensor, small: torch.Tensor, size: int, what: str) -> str | None:
    """Return an error text if `large` does not have `size` times as many elements as `small`, or has another dtype."""
    if large.dtype != small.dtype or large.numel() != size * small.numel():
        return f"expected the {what} to hold {size} times {tensor_in_words(small)}, found {tensor_in_words(large)}"
    return None


def no_size(numel: object, dtype: object) -> str | None:
    """Return an error text if torch cannot make a flat tensor of `numel` elements of `dtype`, otherwise None."""
    if not isinstance(dtype, torch.dtype):
        return f"expected a torch.dtype, found {dtype!r}"
    # An integer of another library may be narrow, so that a product with it overflows.
    if not is_integer(numel) or not 0 <= int(cast(int, numel)) * dtype.itemsize < 2**63:
        return f"expected a number of elements of 0 or above, whose bytes 63 bits can count, found {numel!r} of {dtype}"
    return None


def bad_splits(what: str, tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> str | None:
    """Return an error text if `splits` do not divide a tensor's rows among the ranks. `splits=None`: equal numbers."""
    if tensor.dim() == 0:
        return f"expected the {what} to have at least one dimension to split, found a 0-dimensional tensor"
    rows = tensor.shape[0]
    if splits is None:
        return None if rows % size == 0 else f"the {what} has {rows} rows, which {size} ranks cannot share evenly; pass splits"
    if not is_list_of_integers(splits):
        return f"expected the {what} splits to be a list of integers, found {splits!r}"
    numbers = list(map(int, splits))  # integers of NumPy may be narrow, so their sum would be wrong
    if len(numbers) != size or min(numbers, default=0) < 0 or sum(numbers) != rows:
        return f"expected {size} {what} splits, none below 0, that add up to its {rows} rows, found {numbers}"
    return None


def overlapping(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()) -> str | None:
    """Return an error text if two outputs, or an output and an input, share memory."""
    # Sort the tensors by their first byte, and compare each tensor with the earlier ones. Two inputs may overlap.
    extents = sorted((*_extent(tensor), is_output) for tensor, is_output in _marked(outputs, inputs) if tensor.numel())
    written_to = read_to = -1
    for start, end, is_output in extents:
        if start < written_to or (is_output and start < read_to):
            return "an output shares memory with another tensor of the same call; pass tensors that do not overlap"
        if is_output:
            written_to = max(written_to, end)
        else:
            read_to = max(read_to, end)
    return None


def not_own_part(part: torch.Tensor, block: torch.Tensor, rank: int) -> str | None:
    """Return an error text if `part` shares memory with `block`, but is not exactly part number `rank` of `block`.

    `block` consists of one part for each rank, in the order of the ranks.
    """
    if not part.is_contiguous() or not block.is_contiguous():
        return None  # a tensor with gaps is copied before the call, and the copy shares no memory
    start, end = _extent(part)
    first, last = _extent(block)
    # These cases are valid, in this order: an empty part, a part before or behind the block, this rank's own part.
    if start >= end or end <= first or start >= last or start == first + rank * part.nbytes:
        return None
    return (
        f"{tensor_in_words(part)} shares memory with {tensor_in_words(block)} without being its part number {rank}, which "
        "belongs to this rank; pass that part, or a tensor that does not overlap"
    )


def _marked(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, bool]]:
    return [(tensor, True) for tensor in outputs] + [(tensor, False) for tensor in inputs]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the tensor's first byte, and the address after its last byte."""
    # Another tensor may lie in the gaps of a tensor that is not contiguous, so take only the first element.
    elements = tensor.numel() if tensor.is_contiguous() else 1
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
