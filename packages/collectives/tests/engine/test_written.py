"""Autograd learns which tensors a collective has written: what was saved of them for a backward is refused, not used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import ProcessGroup
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.gloo import connect

pytestmark = pytest.mark.ranks

Call = Callable[[ProcessGroup, torch.Tensor], object]
"""Writes the tensor on rank 0, from rank 1."""


def over_gloo(outer: ProcessGroup, store: dist.Store) -> HostGroup:
    """Gloo writes memory without torch's knowledge; ranks as threads that copy tensors do not."""
    transport = connect(store, outer.rank, outer.size, "written", CancelScope(30))
    return HostGroup(transport, outer.rank, outer.size, name="written", timeout_s=30)


def sent_or_received(group: ProcessGroup, tensor: torch.Tensor) -> object:
    return group.recv(tensor, 1) if group.rank == 0 else group.send(tensor, 0)


CALLS: dict[str, Call] = {
    "all_reduce": lambda group, tensor: group.all_reduce(tensor),
    "reduce": lambda group, tensor: group.reduce(tensor, 0),
    "broadcast": lambda group, tensor: group.broadcast(tensor, 1),
    "scatter": lambda group, tensor: group.scatter(tensor, [tensor + 1, tensor + 1] if group.rank == 1 else None, 1),
    "all_gather_into_tensor": lambda group, tensor: group.all_gather_into_tensor(tensor, torch.ones(2)),
    "reduce_scatter_tensor": lambda group, tensor: group.reduce_scatter_tensor(tensor, torch.ones(8)),
    "all_to_all_single": lambda group, tensor: group.all_to_all_single(tensor, torch.ones(4)),
    "recv": sent_or_received,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_backward_does_not_use_what_a_collective_wrote_over(call: Call) -> None:
    store = dist.HashStore()

    def body(outer: ProcessGroup) -> None:
        group = over_gloo(outer, store)
        tensor, weight = torch.full((4,), 3.0), torch.ones(4, requires_grad=True)
        product = (tensor * weight).sum()  # saves the tensor
        call(group, tensor)
        outer.barrier()
        group.close()
        if outer.rank == 0:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()

    run_ranks(2, body)


def test_what_is_only_read_may_be_used() -> None:
    store = dist.HashStore()

    def body(outer: ProcessGroup) -> None:
        group = over_gloo(outer, store)
        tensor, weight = torch.full((4,), 3.0), torch.ones(4, requires_grad=True)
        product = (tensor * weight).sum()
        group.broadcast(tensor, 0)
        outer.barrier()
        group.close()
        if outer.rank == 0:
            product.backward()
            assert weight.grad is not None
            assert torch.equal(weight.grad, torch.full((4,), 3.0))

    run_ranks(2, body)
