"""All-reduce of tensors that lie in windows on several nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ....collective import Collective
from ....deadline import Deadline
from ....reduce_op import ReduceOp, Reduction
from ....reduction import combine, core_op
from .in_window import InWindow
from .slicing import slice_of

if TYPE_CHECKING:
    from ..transport import MPITransport

# What crosses at a time: large against the latency of a network, small enough to be memory that is soon used again.
CROSSING_BYTES = 4 << 20
# What is staged of a tensor that is in no window, for each rank.
STAGE_BYTES = 16 << 20


def all_reduce_across(
    window: InWindow,
    tensor: torch.Tensor,
    op: Reduction,
    owner: int,
    owners: int,
    ranks: int,
    between: MPITransport,
    call: Collective,
    deadline: Deadline,
) -> None:
    """Combine a slice inside the node, then with its counterparts on the other nodes, and hand it out on this node.

    Halves shall be rounded once: they cross as the float32 that they are summed in, and come back as halves.

    Args:
        window: where the tensor lies on this node.
        tensor: this rank's.
        op: of the whole group.
        owner: the slice that is this rank's.
        owners: how many slices there are: how many ranks of each node own one.
        ranks: how many ranks the group has.
        between: of the owners of this slice.
        call: that one.
        deadline: of the call.
    """
    for terms in window.terms(tensor, *slice_of(tensor.numel(), owners, owner), CROSSING_BYTES):
        mine = terms[owner]
        total = combine(op, terms, mine)
        if total.dtype is not mine.dtype:
            between.all_reduce_widened(total, core_op(op), ranks if op is ReduceOp.AVG else 1, mine, call, deadline)
        else:
            between.all_reduce(total, core_op(op), call, deadline)
            if op is ReduceOp.AVG:
                total.div_(ranks)
            if total is not mine:
                mine.copy_(total)
        window.hand_out(terms)
