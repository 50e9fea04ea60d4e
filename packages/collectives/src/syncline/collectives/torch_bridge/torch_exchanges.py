"""torch's all-to-all, sends and receives, on a group of ours."""

# Each method accepts the arguments of several overloads of torch, and also has its older name.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..tensors import checks
from ..torch_internals import disable_dynamo
from .call_issuer import CallIssuer
from .options import only
from .watched import Seen


class TorchExchanges(CallIssuer):
    """torch's collectives with a tensor for each rank on both sides, and its transfers between two ranks."""

    # ---- one tensor for each rank on both sides ----

    @disable_dynamo
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Send a part of the rows to each rank, and receive rows from each. Without sizes, all parts are equal."""
        group, sizes = self.syncline_group, (output_split_sizes or None, input_split_sizes or None)
        return self._issue(
            "all_to_all",
            [input],
            lambda is_async: group.all_to_all_single(output, input, *sizes, async_op=is_async),
            opts,
            timeout,
            lambda: Seen("all_to_all_single", [input], [output], _splits(output, input, sizes, group.size)),
        )

    @disable_dynamo
    def alltoall(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Send a tensor to each rank, and receive a tensor from each rank."""
        group = self.syncline_group
        return self._issue(
            "all_to_all",
            list(input_tensors),
            lambda is_async: group.all_to_all(output_tensors, input_tensors, async_op=is_async),
            opts,
            timeout,
        )

    # ---- two ranks ----

    @disable_dynamo
    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Begin to send a tensor to one rank."""
        group, tensor = self.syncline_group, only(tensors, "tensor")
        return self._issue("send", [tensor], lambda _: group.send(tensor, dst, tag, async_op=True))

    @disable_dynamo
    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from one rank."""
        group, tensor = self.syncline_group, only(tensors, "tensor")
        return self._issue("recv", [tensor], lambda _: group.recv(tensor, src, tag, async_op=True))

    @disable_dynamo
    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from any rank. The work's `source_rank` names the sender."""
        group, tensor = self.syncline_group, only(tensors, "tensor")
        return self._issue("recvAnySource", [tensor], lambda _: group.recv(tensor, None, tag, async_op=True))

    alltoall_base = all_to_all_single  # its older name, by which C++ calls it


def _splits(
    output: torch.Tensor, input: torch.Tensor, sizes: tuple[Sequence[int] | None, Sequence[int] | None], ranks: int
) -> tuple[list[int] | None, ...]:
    """The numbers of rows from and to each rank; None if the tensors do not fit, so that the group itself raises the error."""
    if output.shape[1:] != input.shape[1:] or output.dtype != input.dtype:
        return None, None
    both = ((output, sizes[0]), (input, sizes[1]))
    if any(checks.bad_splits("tensor", tensor, splits, ranks) for tensor, splits in both):
        return None, None
    return tuple(list(splits or [tensor.shape[0] // ranks] * ranks) for tensor, splits in both)
