"""Each collective as calls on a communicator, made while its stream is the current one.

A function prepares (copies into plain order, where the caller's tensor is not), calls NCCL, and returns what remains to be
done on the stream after that, or None. Between the two, the calls of several collectives may be put into one NCCL group. The
few that exchange terms and reduce them themselves need several calls, one after the other, and are marked `in_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from ...reduce_op import Reduction
from ...tensors.layout import flat, in_plain_order, mark_written
from ...tensors.reduction import reduce_in_rank_order
from .communicator import Communicator
from .datatypes import NativeReduction, as_reduced

Deliver: TypeAlias = Callable[[], object]
Body: TypeAlias = Callable[[Communicator], "Deliver | None"]


def all_reduce(comm: Communicator, tensor: torch.Tensor, native: NativeReduction) -> Deliver | None:
    """NCCL's all-reduce, in place."""
    wire = in_plain_order(tensor)
    comm.all_reduce(as_reduced(_scaled(flat(wire), native)), native.op)
    return _copy_back(wire, tensor)


def all_reduce_in_steps(comm: Communicator, tensor: torch.Tensor, op: Reduction) -> None:
    """Each rank reduces a slice of all ranks' terms in rank order, then all gather the slices: 2 n (p-1)/p bytes, as a ring."""
    wire = flat(in_plain_order(tensor))
    length = -(-wire.numel() // comm.size)
    padded = wire.new_zeros(length * comm.size)
    padded[: wire.numel()] = wire
    result = torch.empty_like(padded)
    comm.all_gather(result, _reduced_slice(comm, padded, op))
    tensor.copy_(result[: wire.numel()].view(tensor.shape))


def reduce(comm: Communicator, tensor: torch.Tensor, root: int, native: NativeReduction) -> Deliver | None:
    """NCCL's reduce; only the root's tensor is written."""
    wire = in_plain_order(tensor)
    if native.factor is not None and comm.rank != root:
        wire = wire.clone()
    comm.reduce(as_reduced(_scaled(flat(wire), native)), root, native.op)
    return _copy_back(wire, tensor) if comm.rank == root else None


def reduce_in_steps(comm: Communicator, tensor: torch.Tensor, root: int, op: Reduction) -> None:
    """As for all; only the root keeps it."""
    copy = tensor.clone()
    all_reduce_in_steps(comm, copy, op)
    if comm.rank == root:
        tensor.copy_(copy)


def reduce_scatter(comm: Communicator, output: torch.Tensor, block: torch.Tensor, native: NativeReduction) -> Deliver | None:
    """NCCL's reduce-scatter; `block` holds the terms for every rank, flat."""
    wire = in_plain_order(output)
    source = block if native.factor is None else block * native.factor
    comm.reduce_scatter(as_reduced(flat(wire)), as_reduced(source), native.op)
    return _copy_back(wire, output)


def reduce_scatter_in_steps(comm: Communicator, output: torch.Tensor, block: torch.Tensor, op: Reduction) -> None:
    """All terms of a slice to the rank that gets it, which reduces them in rank order."""
    output.copy_(_reduced_slice(comm, block, op).view(output.shape))


def broadcast(comm: Communicator, tensor: torch.Tensor, root: int) -> Deliver | None:
    """NCCL's broadcast, in place."""
    wire = in_plain_order(tensor)
    comm.broadcast(flat(wire), root)
    return _copy_back(wire, tensor) if comm.rank != root else None


def all_gather(comm: Communicator, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Deliver:
    """NCCL's all-gather into a block, which is then taken apart."""
    mine = flat(in_plain_order(tensor))
    block = mine.new_empty(comm.size * mine.numel())
    comm.all_gather(block, mine)
    return lambda: _unpack(block, outputs)


def all_gather_into_tensor(comm: Communicator, output: torch.Tensor, tensor: torch.Tensor) -> Deliver | None:
    """NCCL's all-gather, without a copy where both lie in plain order."""
    wire = in_plain_order(output)
    comm.all_gather(flat(wire), flat(in_plain_order(tensor)))
    return _copy_back(wire, output)


def gather(comm: Communicator, tensor: torch.Tensor, outputs: Sequence[torch.Tensor] | None, root: int) -> Deliver | None:
    """Every other rank sends to the root."""
    mine = flat(in_plain_order(tensor))
    if outputs is None:
        comm.send(mine, root)
        return None
    block = mine.new_empty(comm.size * mine.numel())
    parts = _parts(block, comm.size)
    parts[root].copy_(mine)
    with comm.group():
        for peer in _others(comm):
            comm.recv(parts[peer], peer)
    return lambda: _unpack(block, outputs)


def scatter(comm: Communicator, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> Deliver | None:
    """The root sends to every other rank."""
    wire = in_plain_order(tensor)
    if inputs is None:
        comm.recv(flat(wire), root)
        return _copy_back(wire, tensor)
    parts = [flat(in_plain_order(entry)) for entry in inputs]
    with comm.group():
        for peer in _others(comm):
            comm.send(parts[peer], peer)
    tensor.copy_(parts[root].view(tensor.shape))
    return None


def all_to_all(comm: Communicator, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Deliver:
    """Every rank sends to and receives from every other, in one NCCL group."""
    received = [in_plain_order(output) for output in outputs]
    exchange(comm, [flat(wire) for wire in received], [flat(in_plain_order(entry)) for entry in inputs])

    def deliver() -> None:
        for wire, output in zip(received, outputs, strict=True):
            if wire is not output:
                output.copy_(wire)

    return deliver


def all_to_all_single(
    comm: Communicator, output: torch.Tensor, tensor: torch.Tensor, received_counts: Sequence[int], sent_counts: Sequence[int]
) -> Deliver | None:
    """The same with parts of one tensor; the counts are elements."""
    wire = in_plain_order(output)
    sent = torch.split(flat(in_plain_order(tensor)), list(sent_counts))
    exchange(comm, torch.split(flat(wire), list(received_counts)), sent)
    return _copy_back(wire, output)


def exchange(comm: Communicator, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> None:
    """A send to and a receive from each rank; flat tensors in plain order. What a rank sends to itself is copied."""
    received[comm.rank].copy_(sent[comm.rank])
    with comm.group():
        for peer in _others(comm):
            comm.send(sent[peer], peer)
            comm.recv(received[peer], peer)


def send(comm: Communicator, tensor: torch.Tensor) -> None:
    """From rank 0 of a communicator of two to rank 1."""
    comm.send(flat(in_plain_order(tensor)), 1)


def recv(comm: Communicator, tensor: torch.Tensor) -> Deliver | None:
    """By rank 1 of a communicator of two from rank 0."""
    wire = in_plain_order(tensor)
    comm.recv(flat(wire), 0)
    return _copy_back(wire, tensor)


def barrier(comm: Communicator, device: torch.device) -> None:
    """The smallest all-reduce."""
    comm.all_reduce(torch.zeros(1, dtype=torch.uint8, device=device), 0)


def _reduced_slice(comm: Communicator, block: torch.Tensor, op: Reduction) -> torch.Tensor:
    terms = torch.empty_like(block)
    exchange(comm, _parts(terms, comm.size), _parts(block, comm.size))
    return reduce_in_rank_order(op, _parts(terms, comm.size))


def _parts(block: torch.Tensor, size: int) -> list[torch.Tensor]:
    return list(block.view(size, block.numel() // size))


def _others(comm: Communicator) -> list[int]:
    """Starting with the next rank, so that not all send to rank 0 first."""
    return [(comm.rank + step) % comm.size for step in range(1, comm.size)]


def _scaled(wire: torch.Tensor, native: NativeReduction) -> torch.Tensor:
    return wire if native.factor is None else wire.mul_(native.factor)


def _unpack(block: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    for output, part in zip(outputs, _parts(block, len(outputs)), strict=True):
        output.copy_(part.view(output.shape))


def _copy_back(wire: torch.Tensor, tensor: torch.Tensor) -> Deliver | None:
    """What remains to be done if the wire is a copy in plain order; if it is the tensor, autograd learns that it is written."""
    if wire is not tensor:
        return lambda: tensor.copy_(wire)
    mark_written(tensor)
    return None
