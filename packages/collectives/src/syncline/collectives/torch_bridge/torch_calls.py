"""`TorchCalls` starts the collectives of a group of torch.distributed. `TorchGroup` and the Gloo transport use this class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..reduce_op import BOOL, HALVES, PremulSum, ReduceOp, Reduction, divide
from ..tensors.layout import bytes_of, in_plain_order, untracked
from ..tensors.reduction import core_op, reduce_in_rank_order
from .torch_work import TorchRequest, TorchWork, mapped

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend as TorchBackend  # the base of ProcessGroupGloo

_TORCH_OP: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}

# Dtypes that torch's CPU groups must reduce as another dtype. Halves become float32, so that sums are rounded once. Gloo does
# not have int16 and bool.
_REDUCED_AS = {torch.int16: torch.int32, **dict.fromkeys(HALVES, torch.float32), **dict.fromkeys(BOOL, torch.uint8)}

# With fewer ranks than this, each rank sends its halves to every other rank: with p ranks, 2 (p - 1) bytes for each element.
# A ring of float32 would send more, 8 (p - 1) / p bytes.
_RING_FROM_RANKS = 4


class TorchCalls:
    """Starts collectives, sends and receives of a group of torch.distributed, at once and on the caller's thread.

    The methods check no arguments: the caller has checked them, as `ProcessGroup` does. Each collective returns a `TorchWork`,
    and the caller must not write to the tensors before this work has finished.

    Args:
        torch_group: a group of torch.distributed, or a `Backend` object of torch.

    Attributes:
        rank: this process's rank in the torch group.
        size: the number of ranks of the torch group.
    """

    def __init__(self, torch_group: dist.ProcessGroup | TorchBackend) -> None:
        self.torch_group: Any = torch_group  # the stub of `Backend` has no collectives
        self.rank: int = torch_group.rank()
        self.size: int = torch_group.size()

    # ---- reductions ----

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> TorchWork:
        """Combine the tensors of all ranks, in place. If torch would compute a wrong result, reduce in rank order instead."""
        if self._swaps_cheaper(tensor):
            terms, torch_work = self._swapped(tensor)
            return self._work([tensor], torch_work, lambda: _reduce_flat(op, terms, tensor))
        # torch's own reduction would give a wrong result, so each rank gathers and reduces the tensors of all ranks.
        if not _torch_reduces(tensor, op):
            terms, torch_work = self._gathered(tensor)
            return self._work([tensor], torch_work, lambda: tensor.copy_(reduce_in_rank_order(op, terms)))
        wire = _reducible(tensor, op)
        options = dist.AllreduceOptions()
        options.reduceOp = _TORCH_OP[core_op(op)]
        torch_work = self.torch_group.allreduce([wire], options)
        return self._work([tensor], torch_work, lambda: self._deliver_reduced(wire, tensor, op))

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction) -> TorchWork:
        """Combine the tensors of all ranks on the root. On other ranks, `tensor` is only read."""
        # Reduce a copy, because a rank that is not the root must keep its tensor.
        copy = tensor.clone()
        return self._work([tensor], self.all_reduce(copy, op), (lambda: tensor.copy_(copy)) if self.rank == root else None)

    def reduce_scatter(self, output: torch.Tensor, wire: torch.Tensor, op: Reduction) -> TorchWork:
        """Combine part r of all ranks' `wire` on rank r, in rank order. `wire` is flat, and has a part for each rank."""
        terms = torch.empty_like(wire)
        counts = [output.numel()] * self.size

        def deliver() -> None:
            rows = terms.view(self.size, output.numel())
            output.copy_(reduce_in_rank_order(op, list(rows)).view(output.shape))

        return self._work([output], self._exchanged(terms, wire, counts, counts), deliver)

    # ---- moves ----

    def barrier(self) -> TorchWork:
        """Wait for all ranks."""
        return self._work([], self.torch_group.barrier(dist.BarrierOptions()), None)

    def broadcast(self, tensor: torch.Tensor, root: int) -> TorchWork:
        """Copy the root's tensor to all ranks, as bytes."""
        wire = in_plain_order(tensor)
        options = dist.BroadcastOptions()
        options.rootRank = root
        torch_work = self.torch_group.broadcast([bytes_of(wire)], options)
        return self._work([tensor], torch_work, None if wire is tensor else lambda: tensor.copy_(wire))

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> TorchWork:
        """Copy the tensor of rank r to `outputs[r]` on all ranks, as bytes."""
        gathered, torch_work = self._gathered(tensor)
        return self._work(outputs, torch_work, lambda: _copy_each(gathered, outputs))

    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor) -> TorchWork:
        """Copy the tensors of all ranks to `output`, one after another, as bytes."""
        gathered, torch_work = self._gathered(tensor)

        def deliver() -> None:
            output.copy_(torch.cat([row.view(-1) for row in gathered]).view(output.shape))

        return self._work([output], torch_work, deliver)

    def gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, root: int) -> TorchWork:
        """Copy the tensor of rank r to `outputs[r]` on the root, as bytes. On other ranks, `outputs` is None."""
        wire = in_plain_order(tensor)
        gathered = [torch.empty_like(wire) for _ in outputs or ()]
        options = dist.GatherOptions()
        options.rootRank = root
        into = [[bytes_of(row) for row in gathered]] if outputs is not None else []
        torch_work = self.torch_group.gather(into, [bytes_of(wire)], options)
        return self._work(outputs or [], torch_work, lambda: _copy_each(gathered, outputs or []))

    def scatter(self, tensor: torch.Tensor, inputs: list[torch.Tensor] | None, root: int) -> TorchWork:
        """Copy `inputs[r]` of the root to `tensor` on rank r, as bytes. On other ranks, `inputs` is None."""
        wire = in_plain_order(tensor)
        options = dist.ScatterOptions()
        options.rootRank = root
        source = [[bytes_of(in_plain_order(entry)) for entry in inputs]] if inputs is not None else []
        torch_work = self.torch_group.scatter([bytes_of(wire)], source, options)
        return self._work([tensor], torch_work, None if wire is tensor else lambda: tensor.copy_(wire))

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_counts: Sequence[int], sent_counts: Sequence[int]
    ) -> TorchWork:
        """Send a part of `sent` to each rank, and receive a part of `received` from each rank, as bytes.

        Both tensors are flat and contiguous. The counts are the numbers of elements of the parts, in the order of ranks.
        """
        return self._work([received], self._exchanged(received, sent, received_counts, sent_counts), None)

    # ---- two ranks ----

    def start_send(self, wire: torch.Tensor, dst: int, tag: int) -> TorchRequest:
        """Begin to send a contiguous tensor, and return the request."""
        torch_work = _begun(lambda: self.torch_group.send([bytes_of(wire)], dst, tag))
        return TorchRequest(torch_work, wire, receives=False)

    def start_recv(self, wire: torch.Tensor, src: int | None, tag: int) -> TorchRequest:
        """Begin to receive a contiguous tensor, and return the request. `src` None means any rank."""
        into = [bytes_of(wire)]
        group = self.torch_group
        torch_work = _begun(lambda: group.recv_anysource(into, tag) if src is None else group.recv(into, src, tag))
        return TorchRequest(torch_work, wire, receives=True, source=src)

    # ---- shared ----

    def _work(self, tensors: list[torch.Tensor], torch_work: Any, finish: Callable[[], Any] | None) -> TorchWork:
        return TorchWork(tensors, torch_work, finish, self.torch_group)

    def _swaps_cheaper(self, tensor: torch.Tensor) -> bool:
        """Return whether a direct exchange of this 16-bit tensor moves fewer bytes than a ring all-reduce in float32."""
        # The ring sends `8 * (size - 1) / size` bytes for each element.
        return tensor.dtype in HALVES and tensor.device.type == "cpu" and 1 < self.size < _RING_FROM_RANKS

    def _gathered(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        wire = in_plain_order(tensor)
        gathered = [torch.empty_like(wire) for _ in range(self.size)]
        return gathered, self.torch_group.allgather([[bytes_of(row) for row in gathered]], [bytes_of(wire)])

    def _swapped(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        """Start an exchange that gives every rank all tensors. Return the flat tensors in rank order, and torch's work."""
        wire = in_plain_order(tensor).view(-1)
        received = wire.new_empty(self.size - 1, wire.numel())
        counts = [0 if rank == self.rank else wire.numel() for rank in range(self.size)]
        # With two ranks there is one receiver, so the tensor is sent without a copy.
        sent = wire if self.size == 2 else wire.repeat(self.size - 1)
        # torch copies less in this exchange than in its all-gather.
        torch_work = self._exchanged(received, sent, counts, counts)
        return [*received[: self.rank], wire, *received[self.rank :]], torch_work

    def _exchanged(
        self, received: torch.Tensor, sent: torch.Tensor, received_counts: Sequence[int], sent_counts: Sequence[int]
    ) -> Any:
        itemsize = sent.element_size()
        return self.torch_group.alltoall_base(
            bytes_of(received),
            bytes_of(sent),
            [count * itemsize for count in received_counts],
            [count * itemsize for count in sent_counts],
            dist.AllToAllOptions(),
        )

    def _deliver_reduced(self, wire: torch.Tensor, tensor: torch.Tensor, op: Reduction) -> None:
        if op is ReduceOp.AVG:
            divide(wire, self.size)
        result = torch.view_as_complex(wire) if tensor.is_complex() else wire
        # Without a copy, `wire` is the program's tensor, and torch has put the result there already.
        if result.data_ptr() != tensor.data_ptr():
            tensor.copy_(result)


def _torch_reduces(tensor: torch.Tensor, op: Reduction) -> bool:
    # If an element is not-a-number, torch's MIN and MAX are wrong on some ranks.
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return not tensor.is_floating_point()
    # torch reduces complex numbers as pairs of real numbers, which is wrong for PRODUCT.
    return op is not ReduceOp.PRODUCT or not tensor.is_complex()


def _reducible(tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
    """Return the tensor in a form that torch can reduce, multiplied by the factor of a `PremulSum`.

    The result shares the tensor's memory if the tensor is contiguous and torch reduces its dtype.
    """
    plain = in_plain_order(tensor)
    real = torch.view_as_real(plain) if tensor.is_complex() else plain
    wire = real.to(_REDUCED_AS.get(real.dtype, real.dtype))
    if isinstance(op, PremulSum):
        with untracked():  # `wire` may be the program's own tensor, which may require a gradient
            wire.mul_(op.factor)
    return wire


def _reduce_flat(op: Reduction, terms: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    into.copy_(reduce_in_rank_order(op, terms).view(into.shape))


def _begun(begin: Callable[[], Any]) -> Any:
    try:
        return begin()
    except RuntimeError as error:
        # Gloo raises if the connection to the other rank is broken.
        raise mapped(error) from error


def _copy_each(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
