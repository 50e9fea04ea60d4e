"""How a tensor lies in memory, the plain order in which it travels, and the blocks into which collectives pack it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import increment_version


def untracked() -> torch.inference_mode:
    """A context in which any tensor may be written: one that requires a gradient, and one made in inference mode.

    (`torch.no_grad()` is not enough for the latter, which a collective may meet on a thread that is not in that mode.)
    """
    return torch.inference_mode()


def mark_written(tensor: torch.Tensor) -> None:
    """Let autograd know that a tensor's memory was written by other means than torch's."""
    if not tensor.is_inference():
        increment_version(tensor)


def is_tracked(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of them needs `untracked`; to enter that costs more than to see that most need nothing."""
    for tensor in tensors:  # noqa: SIM110 - a generator for `any` would cost as much again
        if tensor.requires_grad or tensor.is_inference():
            return True
    return False


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices lead to the same place. A pure function.

    Cost: sorts the dimensions, unless these interleave in a way that only `as_strided` makes; then it looks at every
    element.
    """
    if 0 in shape:
        return False
    reach = 0  # how far apart the elements lie that the dimensions so far span
    for stride, length in sorted((stride, length) for length, stride in zip(shape, strides, strict=True) if length > 1):
        if stride == 0:
            return True
        if stride <= reach:
            return _has_duplicates(shape, strides)
        reach += stride * (length - 1)
    return False


def in_plain_order(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its memory holds its values in order, else a copy that does.

    It does not where there are strides, and where torch conjugates or negates lazily (`conj()`, `conj().imag`).
    """
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with one dimension; itself if it has one already."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor in plain order, flat, as uint8.

    A single element is contiguous to torch whatever its stride, but a view as another dtype wants stride 1.
    """
    return tensor.view(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def contents(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor of bytes on the CPU. They share its memory, so use them as long as the tensor lives."""
    # An array of ctypes counts in 64 bits. `ctypes.string_at` takes a C int: beyond 4 GiB it returns the rest of a division.
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr()))


def _has_duplicates(shape: Sequence[int], strides: Sequence[int]) -> bool:
    places = torch.zeros(1, dtype=torch.int64)
    for length, stride in zip(shape, strides, strict=True):
        places = (places[:, None] + torch.arange(length) * stride).flatten()
    return len(set(places.tolist())) < places.numel()


_ONE_TENSOR = frozenset({"all_reduce", "reduce", "broadcast"})
_PART_IS_READ = frozenset({"all_gather", "all_gather_into_tensor", "gather"})
_WHOLE_IS_LIST = frozenset({"all_gather", "gather", "scatter", "reduce_scatter"})


def pack(
    name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensors that travel, contiguous.

    Args:
        name: the collective's.
        reads: the call's tensors that are only read.
        writes: the call's tensors that are written.
        size: the number of ranks.

    Returns:
        The part and the whole; the whole is None on the ranks of a gather or scatter that are not the root.
    """
    if name in _ONE_TENSOR:
        wire = in_plain_order(writes[0])
        return wire, wire
    if name == "all_to_all":
        received = torch.empty(sum(map(torch.numel, writes)), dtype=writes[0].dtype, device=writes[0].device)
        return received, in_one_block(reads)
    if name in _PART_IS_READ:
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
    """Copy what has come to the tensors that the call writes; let autograd know what was written in place."""
    wire = whole if name in _PART_IS_READ else part
    if wire is None or not writes or name == ("broadcast" if is_root else "reduce"):
        return  # nothing was written on this rank
    if name == "all_to_all" or (name in _WHOLE_IS_LIST and name in _PART_IS_READ):
        for output, piece in zip(writes, torch.split(flat(wire), [output.numel() for output in writes]), strict=True):
            output.copy_(piece.view(output.shape))
    elif wire is writes[0]:
        mark_written(wire)
    else:
        writes[0].copy_(wire)


def in_one_block(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors one after the other, flat; a single tensor in plain order itself."""
    parts = [flat(in_plain_order(tensor)) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def empty_block(part: torch.Tensor, size: int) -> torch.Tensor:
    """Room for `size` tensors like `part`, flat."""
    return torch.empty(size * part.numel(), dtype=part.dtype, device=part.device)
