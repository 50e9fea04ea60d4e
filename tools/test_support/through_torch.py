"""Wraps a group of torch.distributed as one of ours, over torch.distributed's own functions: to run our checks over it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from syncline.collectives.engine.call import Signature
from syncline.collectives.engine.cancel_scope import DEFAULT_TIMEOUT_S
from syncline.collectives.errors import InvalidArgumentError
from syncline.collectives.group import ProcessGroup
from syncline.collectives.reduce_op import PremulSum, ReduceOp, Reduction
from syncline.collectives.torch_bridge.torch_work import TorchWork
from syncline.collectives.work import FinishedWork, Work

# The names since torch 2.13, which warns about the old ones.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ThroughTorch(ProcessGroup):
    """Passes each collective to the function of torch.distributed, such as `torch.distributed.all_reduce`.

    `TorchGroup` instead talks to the torch group itself, and adds what the group cannot do; this class does neither. Closing it
    destroys the torch group.

    Args:
        torch_group: None for the default group.
    """

    def __init__(self, torch_group: dist.ProcessGroup | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        chosen: Any = dist.group.WORLD if torch_group is None else torch_group
        super().__init__(
            dist.get_rank(chosen), dist.get_world_size(chosen), timeout_s=timeout_s, ranks=dist.get_process_group_ranks(chosen)
        )
        self.torch_group = chosen

    @property
    def backend_name(self) -> str:
        """The name under which torch knows the backend."""
        return str(dist.get_backend(self.torch_group))

    @property
    def device_types(self) -> frozenset[str]:
        """The types that torch reports."""
        return frozenset(device.type for device in self.torch_group._device_types)

    def describe(self) -> str:
        """torch's name of the group."""
        return f"torch.distributed.* over {self.backend_name}"

    def close(self) -> None:
        """Destroy the torch group; a second call does nothing."""
        if self.torch_group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self.torch_group)

    def abort(self) -> None:
        """Abort the group."""
        self.torch_group.abort()

    def _issue(
        self, signature: Signature, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], async_op: bool
    ) -> Work:
        op = signature.op
        if signature.name == "all_reduce" and op is ReduceOp.PRODUCT and writes[0].is_complex():
            # torch's function refuses PRODUCT before it asks the group.
            return self._directly(writes[0], dist.ReduceOp.PRODUCT, async_op)
        outputs = list(writes)
        return self._work(outputs, self._by_function(signature, list(reads), outputs, async_op))

    def _by_function(self, signature: Signature, reads: list[torch.Tensor], writes: list[torch.Tensor], async_op: bool) -> Any:
        """The result of torch's function."""
        common: Any = {"group": self.torch_group, "async_op": async_op}
        op = None if signature.op is None else _torchs(signature.op)
        root, is_root = signature.root, signature.root == self.rank
        match signature.name:
            case "barrier":
                return dist.barrier(**common)
            case "all_reduce":
                return dist.all_reduce(writes[0], op, **common)
            case "reduce":
                return dist.reduce(writes[0], op=op, group_dst=root, **common)
            case "broadcast":
                return dist.broadcast(writes[0], group_src=root, **common)
            case "all_gather":
                return dist.all_gather(writes, reads[0], **common)
            case "all_gather_into_tensor":
                return _all_gather_single(writes[0], reads[0], **common)
            case "gather":
                return dist.gather(reads[0], writes if is_root else None, group_dst=root, **common)
            case "scatter":
                return dist.scatter(writes[0], reads if is_root else None, group_src=root, **common)
            case "reduce_scatter":
                return dist.reduce_scatter(writes[0], reads, op, **common)
            case "reduce_scatter_tensor":
                return _reduce_scatter_single(writes[0], reads[0], op, **common)
            case "all_to_all":
                return dist.all_to_all(writes, reads, **common)
            case "all_to_all_single":
                received, sent = _in_rows(signature, reads[0])
                return dist.all_to_all_single(writes[0], reads[0], received, sent, **common)
        raise AssertionError(f"no collective {signature.name}")

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work:
        return self._transfer(tensor, dist.isend(tensor, group=self.torch_group, tag=tag, group_dst=dst), async_op)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work:
        return self._transfer(tensor, dist.irecv(tensor, group=self.torch_group, tag=tag, group_src=src), async_op)

    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None:
        """Every rank makes only its own group, together with the group's members.

        A rank without a color makes a group of its own, too. torch 2.15 names such groups by how many a rank has made, so ranks
        with different numbers would wait for groups with different names.
        """
        given: list[Any] = [None] * self.size
        dist.all_gather_object(given, (color, key), self.torch_group)
        chosen = sorted((entry[1], rank) for rank, entry in enumerate(given) if entry[0] == color)
        if color is None:
            dist.destroy_process_group(dist.new_group([self.ranks[self.rank]], use_local_synchronization=True))
            return None
        ranks = [self.ranks[rank] for _, rank in chosen]
        order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}  # does not exist before torch 2.11
        made = dist.new_group(ranks, use_local_synchronization=True, **order)
        return ThroughTorch(made, timeout_s=timeout_s)

    def _directly(self, tensor: torch.Tensor, op: Any, async_op: bool) -> Work:
        work = self._work([tensor], self.torch_group.allreduce([tensor], op=op))
        if not async_op:
            work.wait(self.timeout_s)
        return work

    def _work(self, outputs: list[torch.Tensor], torch_work: Any) -> Work:
        return FinishedWork(outputs) if torch_work is None else TorchWork(outputs, torch_work, None)

    def _transfer(self, tensor: torch.Tensor, torch_work: Any, async_op: bool) -> Work:
        work = _Transfer([tensor], torch_work, None)
        if not async_op:
            work.wait(self.timeout_s)
        return work


class _Transfer(TorchWork):
    def source_rank(self) -> int | None:
        """The sender, of a receive that has finished; None of another work."""
        try:
            return int(self._torch_work._source_rank())
        except InvalidArgumentError:
            return None


def _torchs(op: Reduction) -> Any:
    if isinstance(op, PremulSum):
        return dist._make_nccl_premul_sum(op.factor)
    return getattr(dist.ReduceOp, op.name)


def _in_rows(signature: Signature, tensor: torch.Tensor) -> list[list[int]]:
    """How many rows come from each rank, and how many go to each."""
    assert signature.splits is not None
    row = math.prod(tensor.shape[1:])
    return [[numel // row for numel in numels] for numels in signature.splits]
