"""Halves over Gloo travel as halves, are added in float32, and are rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import ProcessGroup, ReduceOp, TorchGroup, premul_sum
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.gloo import GlooTransport

pytestmark = pytest.mark.ranks

NUMEL = 200_003  # beyond the sizes from which the backend scatters and sums go piece by piece; no multiple of 2 or 3


class Recording:
    """A torch group that notes how many bytes this rank sends in each collective, by the algorithms that Gloo has."""

    def __init__(self, torch_group: Any) -> None:
        self._group = torch_group
        self.sent: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self._note("ring", 2 * tensors[0].nbytes * (self._group.size() - 1) // self._group.size())
        return self._group.allreduce(tensors, options)

    def allgather(self, outputs: Any, tensors: list[torch.Tensor]) -> Any:
        self._note("all-gather", tensors[0].nbytes * (self._group.size() - 1))
        return self._group.allgather(outputs, tensors)

    def alltoall_base(self, received: Any, sent: Any, received_counts: Any, sent_counts: list[int], options: Any) -> Any:
        self._note("all-to-all", sum(sent_counts) - sent_counts[self._group.rank()])
        return self._group.alltoall_base(received, sent, received_counts, sent_counts, options)

    def _note(self, name: str, nbytes: int) -> None:
        self.sent.append((name, nbytes))


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Sums of these need more bits than a half has."""
    return ((torch.arange(NUMEL) % 61) * (rank + 1) + 0.25 * rank).to(dtype)


def all_reduced(
    size: int, dtype: torch.dtype, op: Any, wrap: Callable[[Any, dist.Store], ProcessGroup]
) -> list[tuple[torch.Tensor, list[tuple[str, int]]]]:
    store, kept = dist.HashStore(), []

    def body(outer: ProcessGroup) -> tuple[torch.Tensor, list[tuple[str, int]]]:
        gloo = dist.ProcessGroupGloo(store, outer.rank, size, dist.default_pg_timeout)
        kept.append(gloo)  # Gloo's own thread must not drop the last reference to its group
        recording = Recording(gloo)
        group, tensor = wrap(recording, store), values(outer.rank, dtype)
        group.all_reduce(tensor, op)
        outer.barrier()
        group.close()
        return tensor, recording.sent

    return run_ranks(size, body)


def expected(size: int, dtype: torch.dtype, op: Any) -> torch.Tensor:
    total = sum(values(rank, dtype).float() * (0.5 if op not in (ReduceOp.SUM, ReduceOp.AVG) else 1) for rank in range(size))
    assert isinstance(total, torch.Tensor)
    return (total / size if op is ReduceOp.AVG else total).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, premul_sum(0.5)], ids=["sum", "avg", "premul"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_backend_sends_two_bytes_for_each_in_a_scatter_and_a_gather(size: int, op: Any, dtype: torch.dtype) -> None:
    def wrap(gloo: Any, store: dist.Store) -> HostGroup:
        transport = GlooTransport(gloo, store, name="halves", timeout_s=30)
        return HostGroup(transport, gloo.rank(), size, name="halves", timeout_s=30)

    least = 2 * 2 * NUMEL * (size - 1) // size
    for tensor, sent in all_reduced(size, dtype, op, wrap):
        assert torch.equal(tensor, expected(size, dtype, op))
        assert [name for name, _ in sent] == ["all-to-all", "all-gather"]
        assert least <= sum(nbytes for _, nbytes in sent) <= least + 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("size", "how"), [(2, "all-to-all"), (3, "all-to-all"), (4, "ring")])
def test_the_bare_adapter_swaps_where_that_is_less_than_a_ring_of_float32(size: int, how: str, dtype: torch.dtype) -> None:
    ring = 2 * 4 * NUMEL * (size - 1) // size
    for tensor, sent in all_reduced(size, dtype, ReduceOp.AVG, lambda gloo, _: TorchGroup(gloo, timeout_s=30)):
        assert torch.equal(tensor, expected(size, dtype, ReduceOp.AVG))
        ((name, nbytes),) = sent
        assert name == how
        assert nbytes == (ring if how == "ring" else 2 * NUMEL * (size - 1))
        assert nbytes < ring or how == "ring"
