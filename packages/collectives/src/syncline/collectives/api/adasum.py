"""Adasum combines the gradients of different ranks: it adds up orthogonal gradients, and averages equal gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InvalidArgumentError
from ..group import ProcessGroup
from ..tensors import checks
from ..tensors.layout import untracked
from .default_group import resolve_group


def adasum_coalesced(tensors: Sequence[torch.Tensor], group: ProcessGroup | None = None) -> None:
    """Combine the gradients of all ranks in place by the Adasum rule, instead of a sum or an average.

    Each tensor of the list is combined separately. For the tensors a and b of two ranks, the result is

        (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b

    The result is the sum if a and b are orthogonal, and the mean if they are equal. More ranks are combined in pairs, then in
    pairs of pairs, and so on. If the number p of ranks is not a power of two, let q be the largest power of two below p. Then
    the tensors of each rank r >= q are first combined with the tensors of rank r - q. (S. Maleki et al., "Scaling Distributed
    Training with Adaptive Summation", MLSys 2021.)

    Args:
        tensors: floating-point tensors of one dtype on one device, with the same shapes on every rank. Overwritten with the
            result, which has the same bits on all ranks.
        group: None means the default group.

    Cost: log2(p) exchanges of all tensors between two ranks; log2(q) + 2 exchanges if p is not a power of two. Extra memory:
    two copies of all tensors. The dot products are computed in float64.

    Raises:
        InvalidArgumentError: tensors are not floating point, or differ in dtype or device.
    """
    chosen = resolve_group(group)
    checks.refuse_no_tensors("adasum", chosen.place(), tensors=tensors)
    if not tensors:
        return
    kinds = sorted({f"{tensor.dtype} on {tensor.device}" for tensor in tensors})
    if len(kinds) > 1 or not tensors[0].is_floating_point():
        more = f" and {len(kinds) - 2} more" if len(kinds) > 2 else ""
        raise InvalidArgumentError(
            f"adasum on {chosen.place()}: expected one floating-point dtype on one device, found {', '.join(kinds[:2])}{more}; "
            f"{'call it once for each' if len(kinds) > 1 else 'convert the tensors'}"
        )
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    _combine_all(flat, [tensor.numel() for tensor in tensors], chosen)
    with untracked():
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _combine_all(flat: torch.Tensor, sizes: list[int], group: ProcessGroup) -> None:
    """Combine the buffers `flat` of all ranks, in place. An exchange is a collective, so every rank calls every exchange."""
    rank, power = group.rank, 1
    while power * 2 <= group.size:
        power *= 2
    surplus = group.size - power
    theirs = torch.empty_like(flat)
    # The ranks from `power` on have no partner in the pairs. Each such rank gives its tensors to one of the first ranks,
    # and gets the result back from that rank at the end.
    if surplus:
        if rank >= power:
            _exchange(flat, None, send_to=rank - power, group=group)
        else:
            _exchange(flat, theirs, receive_from=rank + power if rank < surplus else None, group=group)
        if rank < surplus:
            _combine(flat, theirs, sizes)
    distance = 1
    while distance < power:
        peer = rank ^ distance if rank < power else None
        _exchange(flat, theirs, send_to=peer, receive_from=peer, group=group)
        if peer is not None:
            # Combine in the same order on both ranks, so that both ranks get the same bits.
            lower, higher = (flat, theirs) if rank < peer else (theirs, flat)
            _combine(lower, higher, sizes)
            if lower is theirs:
                flat.copy_(theirs)
        distance *= 2
    if surplus:
        if rank >= power:
            _exchange(flat, flat, receive_from=rank - power, group=group)
        else:
            _exchange(flat, None, send_to=rank + power if rank < surplus else None, group=group)


def _exchange(
    mine: torch.Tensor,
    theirs: torch.Tensor | None,
    *,
    send_to: int | None = None,
    receive_from: int | None = None,
    group: ProcessGroup,
) -> None:
    sends = [mine.numel() if rank == send_to else 0 for rank in range(group.size)]
    receives = [mine.numel() if rank == receive_from else 0 for rank in range(group.size)]
    source = mine if send_to is not None else mine[:0]
    target = mine[:0].clone() if receive_from is None or theirs is None else theirs
    group.all_to_all_single(target, source, receives, sends)


def _combine(a: torch.Tensor, b: torch.Tensor, sizes: list[int]) -> None:
    """Combine the tensors in the flat buffers `a` and `b` by the rule of Adasum, into `a`. `sizes` counts elements."""
    for part, other in zip(torch.split(a, sizes), torch.split(b, sizes), strict=True):
        wide, other_wide = part.double(), other.double()
        product = torch.dot(wide, other_wide)
        norm, other_norm = torch.dot(wide, wide), torch.dot(other_wide, other_wide)
        # A tensor of zeros has no direction, so the other tensor is taken unchanged.
        share = torch.where(norm > 0, 1 - product / (2 * norm), 1.0)
        other_share = torch.where(other_norm > 0, 1 - product / (2 * other_norm), 1.0)
        part.copy_(share * wide + other_share * other_wide)
