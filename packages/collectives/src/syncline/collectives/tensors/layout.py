"""The layout of tensors in memory: pack a collective's tensors into contiguous tensors, and unpack the results."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch.autograd.graph import increment_version


def untracked() -> torch.inference_mode:
    """A context in which any tensor may be written, even one that requires a gradient or was made in inference mode.

    `torch.no_grad()` is not enough for tensors that were made in inference mode.
    """
    return torch.inference_mode()


def writing(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which `tensor` may be written. The context is in inference mode only if `tensor` is an inference tensor.

    Use this context for sparse tensors, because CUDA's sparse operators fail in inference mode.
    """
    return untracked() if tensor.is_inference() else torch.no_grad()


def mark_written(tensor: torch.Tensor) -> None:
    """Tell autograd that the tensor's memory was written, but not by torch."""
    if not tensor.is_inference():
        increment_version(tensor)


def is_tracked(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the context `untracked` is needed to write one of the tensors. This test costs less than the context."""
    for tensor in tensors:  # noqa: SIM110 - `any` with a generator would double the cost
        if tensor.requires_grad or tensor.is_inference():
            return True
    return False


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two different indices of a tensor lead to the same place in memory.

    Cost: a sort of the dimensions. If dimensions interleave (only in results of `as_strided`), also a check of every element.
    """
    # Without an element, no two elements can meet.
    if 0 in shape:
        return False
    reach = 0  # the distance between the first and the last element that the dimensions so far can reach
    for stride, length in sorted((stride, length) for length, stride in zip(shape, strides, strict=True) if length > 1):
        if stride == 0:
            return True
        if stride <= reach:  # a step may land between elements that are already there, or on one of them
            return _has_duplicates(shape, strides)
        reach += stride * (length - 1)
    return False


def in_plain_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that is not lazily conjugated or negated: the tensor itself if possible, or a copy."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a tensor with one dimension."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as flat uint8."""
    # torch views a tensor as another dtype only if its stride is 1. A tensor with one element may have any stride.
    return tensor.view(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def contents(tensor: torch.Tensor) -> memoryview:
    """Return a memoryview of the memory of a flat uint8 CPU tensor. Keep the tensor alive while you use the memoryview."""
    # Do not use `ctypes.string_at`: it takes the size as a C int, which overflows for large tensors. An array takes 64 bits.
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr()))


def _has_duplicates(shape: Sequence[int], strides: Sequence[int]) -> bool:
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for length, stride in zip(shape, strides, strict=True):
        places = (places[:, None] + torch.arange(length, device="cpu") * stride).flatten()
    return len(set(places.tolist())) < places.numel()


# A collective moves a part (one rank's data), and most collectives also move a whole (the data of all ranks). These sets say
# whether the part is read or written, and whether the program passes the whole as a list of tensors.
ONE_TENSOR = frozenset({"all_reduce", "reduce", "broadcast"})
PART_IS_READ = frozenset({"all_gather", "all_gather_into_tensor", "gather"})
_WHOLE_IS_LIST = frozenset({"all_gather", "gather", "scatter", "reduce_scatter"})


def pack(
    name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pack a call's tensors into the contiguous tensors that the library moves.

    `reads` are the tensors that the call only reads, `writes` the tensors that it writes.

    Returns:
        The part (the data of one rank) and the whole (the data of all ranks). In an all-reduce, reduce or broadcast, both are
            the same object. In an all-to-all, the part has room for all outputs, and the whole has all inputs. In a gather or
            scatter, the whole is None on ranks other than the root.
    """
    if name in ONE_TENSOR:
        wire = in_plain_order(writes[0])
        return wire, wire
    if name == "all_to_all":
        received = torch.empty(sum(map(torch.numel, writes)), dtype=writes[0].dtype, device=writes[0].device)
        return received, in_one_block(reads)
    if name in PART_IS_READ:
        part = in_plain_order(reads[0])
        if name not in _WHOLE_IS_LIST:
            return part, in_plain_order(writes[0])
        return part, empty_block(part, size) if writes else None
    part = in_plain_order(writes[0])
    if name not in _WHOLE_IS_LIST:
        return part, in_plain_order(reads[0])
    return part, in_one_block(reads) if reads else None


def unpack(
    name: str, part: torch.Tensor, whole: torch.Tensor | None, writes: Sequence[torch.Tensor], *, is_root: bool = False
) -> None:
    """Copy a call's results from `part` or `whole` to `writes`.

    If the library has written a tensor of `writes` itself, copy nothing, but tell autograd.
    """
    wire = whole if name in PART_IS_READ else part
    if wire is None or not writes or name == ("broadcast" if is_root else "reduce"):
        return  # this rank got no result: it is the root of a broadcast, or is not the root of a reduce or gather
    if name == "all_to_all" or (name in _WHOLE_IS_LIST and name in PART_IS_READ):
        for output, piece in zip(writes, torch.split(flat(wire), [output.numel() for output in writes]), strict=True):
            output.copy_(piece.view(output.shape))
    elif wire is writes[0]:  # no copy was needed: the library wrote the program's tensor itself
        mark_written(wire)
    else:
        writes[0].copy_(wire)


def in_one_block(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors into a new flat tensor.

    A single tensor is copied, too: in a group of one rank, the result could otherwise share memory with the output, which
    libraries refuse.
    """
    return torch.cat([flat(in_plain_order(tensor)) for tensor in tensors])


def empty_block(part: torch.Tensor, size: int) -> torch.Tensor:
    """Make a flat tensor with room for `size` tensors like `part`."""
    return torch.empty(size * part.numel(), dtype=part.dtype, device=part.device)
