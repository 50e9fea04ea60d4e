"""A group made of groups: each call goes to one of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack

import torch

from ..contract.process_group import ProcessGroup
from ..contract.reduce_op import Reduction
from ..contract.work import Work


class DelegatingGroup(ProcessGroup):
    """Hands every collective to one of several groups of the same ranks; which one, `_choose` says."""

    @abstractmethod
    def _choose(self, tensor: torch.Tensor | None) -> ProcessGroup:
        """The group for a collective on this tensor, or for one without a tensor."""

    @property
    def profiled_as(self) -> None:
        """Nobody: the groups that it hands the collectives to do."""

    def _all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        return self._choose(tensor).all_reduce(tensor, op, async_op=async_op)

    def _all_reduce_sparse(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        """What it issues from callbacks stays in the one group that was chosen."""
        return self._choose(tensor).all_reduce(tensor, op, async_op=async_op)

    def _reduce(self, tensor: torch.Tensor, root: int, op: Reduction, async_op: bool) -> Work:
        return self._choose(tensor).reduce(tensor, root, op, async_op=async_op)

    def _broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Work:
        return self._choose(tensor).broadcast(tensor, root, async_op=async_op)

    def _all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Work:
        return self._choose(tensor).all_gather(outputs, tensor, async_op=async_op)

    def _all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool) -> Work:
        return self._choose(tensor).all_gather_into_tensor(output, tensor, async_op=async_op)

    def _gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, root: int, async_op: bool) -> Work:
        return self._choose(tensor).gather(tensor, outputs, root, async_op=async_op)

    def _scatter(self, tensor: torch.Tensor, inputs: list[torch.Tensor] | None, root: int, async_op: bool) -> Work:
        return self._choose(tensor).scatter(tensor, inputs, root, async_op=async_op)

    def _reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: Reduction, async_op: bool) -> Work:
        return self._choose(output).reduce_scatter(output, inputs, op, async_op=async_op)

    def _reduce_scatter_tensor(self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        return self._choose(output).reduce_scatter_tensor(output, tensor, op, async_op=async_op)

    def _all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], async_op: bool) -> Work:
        return self._choose(inputs[0]).all_to_all(outputs, inputs, async_op=async_op)

    def _all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: list[int], input_splits: list[int], async_op: bool
    ) -> Work:
        return self._choose(tensor).all_to_all_single(output, tensor, output_splits, input_splits, async_op=async_op)

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work:
        return self._choose(tensor).send(tensor, dst, tag, async_op=async_op)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work:
        return self._choose(tensor).recv(tensor, src, tag, async_op=async_op)

    def _barrier(self, async_op: bool) -> Work:
        return self._choose(None).barrier(async_op=async_op)


def close_all(groups: Iterable[ProcessGroup]) -> None:
    """Close each in turn, also after one that raises."""
    with ExitStack() as closing:
        for group in reversed(list(groups)):
            closing.callback(group.close)
