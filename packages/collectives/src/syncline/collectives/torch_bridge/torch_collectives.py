"""torch's collectives, sends and receives on a Syncline group."""

# Methods accept the arguments of several overloads of torch, and some also have torch's older name. mypy refuses both.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from ..api.coalescing import all_gather_coalesced, all_reduce_coalesced
from ..api.monitored_barrier import monitored_barrier
from ..errors import InvalidArgumentError
from ..group import ProcessGroup
from ..reduce_op import ReduceOp, Reduction, checked_reduction
from ..tensors import checks
from ..tensors.checks import has_fakes, resolved
from ..tensors.layout import untracked
from ..tensors.reduction import reduce_in_rank_order
from ..torch_internals import disable_dynamo
from ..work import FinishedWork, FutureWork, TensorsFuture, Work
from .call_issuer import (
    CallIssuer,
    CoalescedWork,
    check_first_device,
    listed,
    only,
    reduction_of,
    root_of,
    some,
    time_limit_s,
    word,
)
from .watched import Seen

_AT_ONCE_S = 1e-3


class TorchCollectives(CallIssuer):
    """The methods that torch calls for collectives, sends and receives. They run on the Syncline group `syncline_group`."""

    # ---- one tensor on each rank ----

    @disable_dynamo
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None) -> dist.Work:
        """Combine the tensors of all ranks, in place. If a rank passes several tensors, all its tensors get the same result."""
        reduction = reduction_of(opts if op is None else op)
        mine = listed(tensors)
        if len(mine) != 1:
            return self._issue(
                "all_reduce", mine, lambda _: all_reduce_together(self.syncline_group, mine, reduction), opts, timeout
            )
        group, tensor = self.syncline_group, mine[0]
        return self._issue(
            "all_reduce",
            mine,
            lambda is_async: group.all_reduce(tensor, reduction, async_op=is_async),
            opts,
            timeout,
            lambda: Seen("all_reduce", mine, mine, (word(reduction),)),
        )

    @disable_dynamo
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """Combine each tensor, in place, with the tensors at the same index on other ranks.

        One collective may combine several tensors.
        """
        mine, reduction = some(tensors, "allreduce_coalesced"), reduction_of(opts)
        return self._issue(
            "all_reduce_coalesced",
            mine,
            lambda _: self._reduced_together(mine, reduction),
            opts,
            seen=lambda: Seen("all_reduce_coalesced", mine, mine, (word(reduction),)),
        )

    @disable_dynamo
    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> dist.Work:
        """Copy the root's tensor to every rank."""
        group, tensor = self.syncline_group, only(listed(tensors), "tensor")
        check_first_device(opts, [tensor], "broadcast")
        source = root_of(opts) if root is None else root
        return self._issue(
            "broadcast",
            [tensor],
            lambda is_async: group.broadcast(tensor, source, async_op=is_async),
            opts,
            timeout,
            lambda: Seen("broadcast", [tensor], [tensor], (source,)),
        )

    @disable_dynamo
    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> dist.Work:
        """Combine the tensors of all ranks on the root."""
        group, tensor = self.syncline_group, only(listed(tensors), "tensor")
        check_first_device(opts, [tensor], "reduce")
        target = root_of(opts) if root is None else root
        # In torch's short form, `opts` is the root, an int.
        reduction = reduction_of(op if isinstance(opts, int) or op is not None else opts)
        return self._issue(
            "reduce", [tensor], lambda is_async: group.reduce(tensor, target, reduction, async_op=is_async), opts, timeout
        )

    # ---- one tensor on one side, one for each rank on the other ----

    @disable_dynamo
    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Give every rank the tensors of all ranks."""
        group, tensor = self.syncline_group, only(listed(input_tensors), "input")
        outputs = _rows(output_tensors)
        return self._issue(
            "all_gather", [tensor], lambda is_async: group.all_gather(outputs, tensor, async_op=is_async), opts, timeout
        )

    @disable_dynamo
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Give every rank the tensors of all ranks, in one tensor. The input may be a part of the output."""
        group = self.syncline_group
        return self._issue(
            "_all_gather_base",
            [input],
            lambda is_async: group.all_gather_into_tensor(output, input, async_op=is_async),
            opts,
            seen=lambda: Seen("all_gather_into_tensor", [input], [output], (group.size,), gathers=group.size),
        )

    @disable_dynamo
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[torch.Tensor]], input_list: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Give every rank the lists of tensors of all ranks."""

        def issue(_: bool) -> Work:
            return _there(all_gather_coalesced(output_lists, input_list, self.syncline_group, async_op=True))

        return self._issue("all_gather_coalesced", list(input_list), issue, opts)

    @disable_dynamo
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Do several `all_gather_single` in one call."""
        group, pairs = self.syncline_group, list(zip(outputs, inputs, strict=True))

        def issue(_: bool) -> Work:
            return CoalescedWork([group.all_gather_into_tensor(into, tensor, async_op=True) for into, tensor in pairs])

        def seen() -> Seen:
            name = "all_gather_into_tensor_coalesced"
            return Seen(name, list(inputs), list(outputs), (group.size,), gathers=group.size)

        return self._issue("all_gather_into_tensor_coalesced", list(inputs), issue, opts, seen=seen)

    @disable_dynamo
    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Give the root the tensors of all ranks."""
        group, tensor = self.syncline_group, only(listed(input_tensors), "input")
        target = root_of(opts) if root is None else root
        # On other ranks torch passes an empty list, which `_rows` would refuse.
        outputs = _rows(output_tensors) if group.rank == target else None
        return self._issue(
            "gather", [tensor], lambda is_async: group.gather(tensor, outputs, target, async_op=is_async), opts, timeout
        )

    @disable_dynamo
    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Send tensor number r of the root's list to rank r, for each rank r."""
        group, tensor = self.syncline_group, only(listed(output_tensors), "output")
        source = root_of(opts) if root is None else root
        inputs = _rows(input_tensors) if group.rank == source else None
        return self._issue(
            "scatter", inputs or [], lambda is_async: group.scatter(tensor, inputs, source, async_op=is_async), opts, timeout
        )

    @disable_dynamo
    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> dist.Work:
        """Combine the lists of all ranks, tensor by tensor, and give rank r the result for tensor r."""
        group, output = self.syncline_group, only(listed(output_tensors), "output")
        inputs, reduction = _rows(input_tensors), reduction_of(opts if op is None else op)
        return self._issue(
            "reduce_scatter",
            inputs,
            lambda is_async: group.reduce_scatter(output, inputs, reduction, async_op=is_async),
            opts,
            timeout,
        )

    @disable_dynamo
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Combine the tensors of all ranks, divide the result into one part for each rank, and give part r to rank r."""
        group, reduction = self.syncline_group, reduction_of(opts)
        return self._issue(
            "_reduce_scatter_base",
            [input],
            lambda is_async: group.reduce_scatter_tensor(output, input, reduction, async_op=is_async),
            opts,
            seen=lambda: Seen("reduce_scatter_tensor", [input], [output], (word(reduction), group.size), scatters=group.size),
        )

    @disable_dynamo
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Do several `reduce_scatter_single` in one call."""
        group, reduction, pairs = self.syncline_group, reduction_of(opts), list(zip(outputs, inputs, strict=True))

        def issue(_: bool) -> Work:
            return CoalescedWork(
                [group.reduce_scatter_tensor(into, tensor, reduction, async_op=True) for into, tensor in pairs]
            )

        def seen() -> Seen:
            name, words = "reduce_scatter_tensor_coalesced", (word(reduction), group.size)
            return Seen(name, list(inputs), list(outputs), words, scatters=group.size)

        return self._issue("reduce_scatter_tensor_coalesced", list(inputs), issue, opts, seen=seen)

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
        """Send rows of `input` to each rank, and receive rows from each rank. Without sizes, the rows are divided equally."""
        group, sizes = self.syncline_group, (_given(output_split_sizes), _given(input_split_sizes))
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

    # ---- no tensor ----

    @disable_dynamo
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Start a barrier. The returned work is over when all ranks have called this method."""
        group = self.syncline_group
        return self._issue("barrier", [], lambda is_async: group.barrier(async_op=is_async), opts, timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error after a time-out names the missing ranks.

        torch calls this method on groups that report the name "gloo". As in torch, the method does not wait if `timeout` is
        zero. None or a negative `timeout` means the group's time limit.
        """
        waits_for_nobody = timeout is not None and not timeout
        limit_s = _AT_ONCE_S if waits_for_nobody else time_limit_s(timeout)
        monitored_barrier(self.syncline_group, limit_s, wait_all_ranks)

    def _reduced_together(self, tensors: list[torch.Tensor], reduction: Any) -> Work:
        return _there(all_reduce_coalesced(tensors, reduction, self.syncline_group, async_op=True))

    # torch's older names, which C++ still calls.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _rows(tensors: Any) -> list[torch.Tensor]:
    some(tensors, "this collective")
    # torch passes a list with one tensor for each rank, or a list whose only entry is such a list.
    rows = only(tensors, "list of tensors") if isinstance(tensors[0], (list, tuple)) else tensors
    return list(rows)


def _there(work: Work | None) -> Work:
    assert work is not None  # because the call had async_op=True
    return work


def all_reduce_together(group: ProcessGroup, tensors: Sequence[torch.Tensor], op: Reduction) -> Work:
    """Combine all tensors of all ranks, as if each tensor came from a different rank. Every tensor gets the result.

    All ranks of `group` pass the same number of tensors of the same shape and dtype.

    Raises:
        InvalidArgumentError: `tensors` is empty; shapes or dtypes differ; or `op` is AVG or PREMUL_SUM, which also scale the
            result.
    """
    tensors = resolved(some(tensors, "allreduce"))
    # With FakeTensors, the program only computes shapes; see Note [Tensors that are no memory] in `tensors.checks`.
    if has_fakes(tensors):
        return FinishedWork(list(tensors))
    for tensor in tensors:
        problem = checks.unusable(tensor, group.device_types, group.backend_name) or checks.unwritable(tensor)
        if problem is not None:
            raise InvalidArgumentError(f"allreduce on {group.place()}: {problem}")
    first, *others = tensors
    if any(other.shape != first.shape or other.dtype != first.dtype for other in others):
        raise InvalidArgumentError(
            "allreduce of several tensors reduces them together, so they must be alike in shape and dtype: call it for each of "
            "them, or torch.distributed.all_reduce_coalesced"
        )
    op = checked_reduction(op, first.dtype)
    if not isinstance(op, ReduceOp) or op is ReduceOp.AVG:
        raise InvalidArgumentError(f"allreduce of several tensors does not scale, found {op.name}: call it for each tensor")
    with untracked():
        total = reduce_in_rank_order(op, tensors)

    def copy_back(done: Any) -> list[torch.Tensor]:
        done.value()
        with untracked():
            for tensor in tensors:
                tensor.copy_(total)
        return list(tensors)

    future: TensorsFuture = group.all_reduce(total, op, async_op=True).get_future().then(copy_back)
    return FutureWork(future, list(tensors), lambda: f"allreduce of {len(tensors)} tensors on {group.place()}")


def _given(splits: Sequence[int] | None) -> Sequence[int] | None:
    # An empty list means None in torch. Compare the length, because `not splits` fails for an array of NumPy.
    return None if checks.is_list(splits) and len(cast(Sequence[int], splits)) == 0 else splits


def _splits(
    output: torch.Tensor, input: torch.Tensor, sizes: tuple[Sequence[int] | None, Sequence[int] | None], ranks: int
) -> tuple[list[int] | None, ...]:
    """Return how many rows come from each rank, and how many go to each rank; (None, None) if tensors or sizes are invalid."""
    if output.shape[1:] != input.shape[1:] or output.dtype != input.dtype:
        return None, None
    both = ((output, sizes[0]), (input, sizes[1]))
    if any(checks.bad_splits("tensor", tensor, splits, ranks) for tensor, splits in both):
        return None, None
    return tuple([tensor.shape[0] // ranks] * ranks if splits is None else list(map(int, splits)) for tensor, splits in both)
