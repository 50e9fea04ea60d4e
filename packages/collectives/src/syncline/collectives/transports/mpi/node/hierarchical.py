"""All-reduce across several nodes, slice by slice, in shared memory."""

from __future__ import annotations

import torch

from ....engine.call import Call, Signature
from ....reduce_op import ReduceOp, Reduction, divide
from ....tensors.layout import flat
from ....tensors.reduction import combine, core_op
from ...shared_memory.segment import Segment
from ..transport import MPITransport
from .choice import chunks, slice_of
from .memory import Node, Place
from .plan import Algorithm, WindowAlgorithm

# The size of a chunk that is sent between nodes. A chunk is large enough that the network's latency matters little, and small
# enough that its memory is soon used again.
CHUNK_BYTES = 4 << 20
# A tensor is copied to shared memory in pieces of this size. Each rank of the node has room for one piece there.
STAGE_BYTES = 16 << 20


class NodeReduction:
    """Reduces the slice that this rank leads (see `Hierarchy`): inside the node, then with the slice's leaders on other nodes.

    Then copies the result to all ranks of this node. `between` connects the leaders of the slice; None if this rank leads no
    slice.
    """

    def __init__(self, node: Node, between: MPITransport | None, ranks: int) -> None:
        self._node = node
        self._rank = node.hierarchy.node.Get_rank()
        self._leaders = node.hierarchy.leaders
        self._between = between
        self._ranks = ranks
        self._stage: Segment | None = None
        self._may_stage = True

    def stage(self, call: Call) -> Segment | None:
        """Return the stage: the shared memory to which tensors are copied. If it cannot be made, all ranks return None."""
        # If the stage could not be made before, it could not be made on any rank. Do not try again.
        if self._stage is None and self._may_stage:
            self._stage = self._node.segment(STAGE_BYTES, call)
            self._may_stage = self._stage is not None
        return self._stage

    def run(self, place: Place, numel: int, call: Call) -> None:
        """Reduce `numel` elements that are at the same place in shared memory on all ranks.

        The ranks must synchronize before and after this call.
        """
        start, stop = slice_of(numel, self._leaders, self._rank) if self._rank < self._leaders else (0, 0)
        # If this rank leads no slice, or its slice is empty, it has nothing to do.
        if self._between is None or start == stop:
            return
        op, dtype = call.signature.reduction, call.signature.element_dtype
        rows = place.segment.rows(place.offset_bytes + start * dtype.itemsize, stop - start, dtype)
        for begin, end in chunks(0, stop - start, CHUNK_BYTES // dtype.itemsize):
            self._reduce([row[begin:end] for row in rows], self._between, op, call)

    def forget(self) -> None:
        """Release the stage (the shared memory to which tensors are copied)."""
        self._stage, self._may_stage = None, False

    def _reduce(self, terms: list[torch.Tensor], between: MPITransport, op: Reduction, call: Call) -> None:
        mine = terms[self._rank]
        total = combine(op, terms, mine)
        between.presync(total.nbytes, call)
        # If the dtype is float16 or bfloat16, `total` is in float32. Round it only at the end.
        if total.dtype is not mine.dtype:
            divisor = self._ranks if op is ReduceOp.AVG else 1
            between.all_reduce_widened(total, core_op(op), divisor, mine, call)
        else:
            between.all_reduce(total, core_op(op), call)
            if op is ReduceOp.AVG:
                divide(total, self._ranks)
            # For PREMUL_SUM, `combine` returns a new tensor.
            if total is not mine:
                mine.copy_(total)
        for rank, term in enumerate(terms):
            if rank != self._rank:
                term.copy_(mine)


class HierarchicalInWindow(WindowAlgorithm):
    """Reduces tensors that are in a window on every node."""

    name = "hierarchical"

    def __init__(self, node: Node, signature: Signature, reduction: NodeReduction) -> None:
        self._node = node
        self._numel = signature.numel
        self._reduction = reduction

    def run(self, place_key: int, part: torch.Tensor, call: Call) -> None:
        """See `WindowAlgorithm.run`."""
        self._reduction.run(self._node.windows.place(place_key), self._numel, call)
        self._node.local_sync(call).wait(call)


class Hierarchical(Algorithm):
    """Reduces tensors that are in no window. The tensors are copied, piece by piece, to shared memory (the stage).

    Cost: for each piece, the ranks wait for one another twice.
    """

    name = "hierarchical"

    def __init__(self, node: Node, reduction: NodeReduction) -> None:
        self._node = node
        self._reduction = reduction

    def prepare(self, call: Call) -> bool:
        """At the first call, make the stage (shared memory to which tensors are copied). Return whether there is a stage."""
        return self._reduction.stage(call) is not None

    def run(self, part: torch.Tensor, whole: torch.Tensor, call: Call) -> None:
        """For each piece: copy the piece to shared memory, wait for all ranks, reduce, wait again, and copy the result back."""
        stage, sync = self._reduction.stage(call), self._node.local_sync(call)
        assert stage is not None
        place = Place(stage, 0)
        for piece in torch.split(flat(part), STAGE_BYTES // part.element_size()):
            staged = stage.view(stage.mine, 0, piece.numel(), piece.dtype).copy_(piece)
            sync.wait(call)
            self._reduction.run(place, piece.numel(), call)
            sync.wait(call)
            piece.copy_(staged)
