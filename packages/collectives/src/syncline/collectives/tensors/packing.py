"""Between the tensors of a call and the two flat tensors that travel: this rank's part, and the whole with a part of each rank.

=============================  ==================  ==============================
collective                     part                whole
=============================  ==================  ==============================
all_reduce, reduce, broadcast  the tensor          the same
all_gather, gather             read                written (gather: on the root)
scatter, reduce_scatter        written             read (scatter: on the root)
all_to_all                     written             read
=============================  ==================  ==============================

A tensor in plain order travels as it is. Any other tensor is copied into plain order before the call, and back after it.
Lists travel as one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layout import flat, in_plain_order, mark_written

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
