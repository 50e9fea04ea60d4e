"""Collectives that return new tensors. Inputs stay unchanged, and autograd works.

=============================  ================================  ==============================================
function                       what every rank gets              gradient (of the sum of all ranks' losses)
=============================  ================================  ==============================================
`all_reduce_copy`              the reduced tensor                reduced the same way (SUM and AVG only)
`all_gather_rows`              the rows of all ranks             summed; each rank gets the gradient of its rows
`reduce_scatter_rows`          its share of the reduced rows     gathered (SUM and AVG only)
`broadcast_copy`               the root's tensor                 summed on the root, zeros on other ranks
`all_to_all_rows`              the rows sent to it               sent back to the rank that sent the row
`broadcast_object`             the root's object                 none
=============================  ================================  ==============================================

Functions whose names end in `_coalesced` take a list of tensors, and send these tensors together. With `async_op=True` a
function returns a `PendingResult`, and autograd does not work.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar
from zlib import crc32

import torch

from ..errors import DisagreementError, InvalidArgumentError
from ..group import ProcessGroup
from ..reduce_op import ReduceOp, Reduction, from_torch
from ..tensors import checks
from ..work import Work
from . import object_exchange
from .coalescing import all_reduce_coalesced
from .default_group import rank_in, resolve_group

T = TypeVar("T")

_HALVES = (torch.float16, torch.bfloat16)


class PendingResult(Generic[T]):
    """The handle of a collective that returns new tensors and may still be running. `wait` returns the collective's result.

    Only one thread at a time may call `wait`.
    """

    _result: T

    def __init__(self, works: Sequence[Work], finish: Callable[[], T]) -> None:
        self._works = works
        self._finish: Callable[[], T] | None = finish

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> T:
        """Wait for the collective, and return the collective's result. A second call returns the same objects again.

        Raises:
            CollectiveTimeout, TransportError, DisagreementError: as from `Work.wait`.
        """
        for work in self._works:
            work.wait()
        # Finish on the caller's thread, so that an error does not fail the group.
        if self._finish is not None:
            self._result, self._finish, self._works = self._finish(), None, ()
        return self._result


# ---- all_reduce ----


def all_reduce_copy(
    tensor: torch.Tensor,
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Any:
    """Combine the tensors of all ranks into a new tensor on every rank. Autograd works for SUM and AVG.

    Backward reduces the gradients of all ranks with the `op` of the forward. If this `op` is neither SUM nor AVG, backward
    raises an `InvalidArgumentError`.

    Args:
        tensor: any shape. Its shape and dtype are the same on every rank. Only read.
        op: see `ReduceOp`.
        group: None means the default group.
        async_op: if true, return a `PendingResult` of the new tensor at once. Then autograd does not work.
        prescale: multiply each rank's tensor by this factor before the reduction. Integers are multiplied in float64 and
            rounded towards zero; float16 and bfloat16 are multiplied in float32.
        postscale: multiply the result by this factor.

    Returns:
        A contiguous tensor with the shape and dtype of `tensor`. Its bits are the same on every rank.
    """
    return _first(
        all_reduce_copy_coalesced([tensor], op, group, async_op, prescale=prescale, postscale=postscale), async_op=async_op
    )


def all_reduce_copy_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Any:
    """Combine several tensors as `all_reduce_copy` does, in fewer calls. Returns a list of new tensors.

    The tensors travel together, as in `all_reduce_coalesced`. With `async_op`, the result is a `PendingResult` of the list.
    """
    chosen = resolve_group(group)
    checks.refuse_no_tensors("all_reduce_copy", chosen.place(), tensors=tensors)
    if not async_op and _needs_gradients(tensors):
        return list(_AllReduce.apply(chosen, op, prescale, postscale, *tensors))  # type: ignore[no-untyped-call]
    copies = [scaled(tensor.detach(), prescale) for tensor in tensors]
    work = (
        chosen.all_reduce(copies[0], op, async_op=async_op)
        if len(copies) == 1
        else all_reduce_coalesced(copies, op, chosen, async_op)
    )
    pending = PendingResult([work] if work is not None else [], lambda: [_scaled_again(copy, postscale) for copy in copies])
    return pending if async_op else pending.wait()


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the tensor times a factor, as a contiguous copy with the tensor's dtype. Integers are rounded towards zero."""
    if factor == 1.0:
        return tensor.clone(memory_format=torch.contiguous_format)
    if tensor.dtype in _HALVES:
        return (tensor.float() * factor).to(tensor.dtype).contiguous()
    if tensor.is_floating_point() or tensor.is_complex():
        return (tensor * factor).contiguous()
    return (tensor.double() * factor).to(tensor.dtype).contiguous()


def _scaled_again(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1.0 else scaled(tensor, factor)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, op: Reduction, prescale: float, postscale: float, *tensors: torch.Tensor) -> Any:
        ctx.arguments = (group, from_torch(op) or op, prescale, postscale)
        return tuple(all_reduce_copy_coalesced(tensors, op, group, prescale=prescale, postscale=postscale))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group, op, prescale, postscale = ctx.arguments
        _check_differentiable("all_reduce_copy", op, group)
        reduced = all_reduce_copy_coalesced(gradients, op, group, prescale=prescale, postscale=postscale)
        return (None, None, None, None, *reduced)


# ---- all_gather ----


def all_gather_rows(tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Return the rows of all ranks as one new tensor, in the order of ranks. Ranks may pass different numbers of rows.

    Autograd works: each rank gets the gradient of its own rows, summed over the ranks.

    Args:
        tensor: at least one dimension; only read. The dtype and all dimensions but the first are the same on every rank.
        group: None means the default group.
        async_op: if true, return a `PendingResult` of the new tensor. Then autograd does not work. The call still waits until
            the ranks have exchanged their numbers of rows.

    Cost: an all-gather of 16 bytes from each rank, then an all-gather of the rows. All tensors are padded to the largest number
    of rows.

    Raises:
        InvalidArgumentError: the tensor has no dimension.
        DisagreementError: the dtypes differ, or dimensions other than the first differ. Every rank raises this error.
    """
    return _first(all_gather_rows_coalesced([tensor], group, async_op), async_op=async_op)


def all_gather_rows_coalesced(
    tensors: Sequence[torch.Tensor], group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Gather several tensors as `all_gather_rows` does, in fewer calls. Returns a list of new tensors.

    Every rank passes the same number of tensors. Tensors of the same dtype and device travel in one all-gather. With
    `async_op`, the result is a `PendingResult` of the list.
    """
    chosen = resolve_group(group)
    checks.refuse_no_tensors("all_gather_rows", chosen.place(), tensors=tensors)
    # Without a tensor there is nothing to send, not even the numbers of rows.
    if not tensors:
        nothing: PendingResult[list[torch.Tensor]] = PendingResult([], list)
        return nothing if async_op else nothing.wait()
    if not async_op and _needs_gradients(tensors):
        return list(_AllGatherRows.apply(chosen, *tensors))  # type: ignore[no-untyped-call]
    rows = _rows_of_all("all_gather_rows", tensors, chosen)
    works: list[Work] = []
    finishers: list[Callable[[], None]] = []
    outputs: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for members in _by_kind(tensors):
        widths = {index: _width(tensors[index]) for index in members}
        lengths = [sum(counts[index] * widths[index] for index in members) for counts in rows]
        flat = torch.cat([tensors[index].detach().reshape(-1) for index in members])
        longest = max(lengths)
        block = flat.new_empty(chosen.size, longest)
        # The rows of the block are equally long, so a rank with fewer elements pads them with zeros.
        mine = flat if flat.numel() == longest else torch.cat([flat, flat.new_zeros(longest - flat.numel())])
        works.append(chosen.all_gather_into_tensor(block, mine, async_op=async_op))

        def unpack(block: torch.Tensor = block, members: list[int] = members, widths: dict[int, int] = widths) -> None:
            begins = [0] * chosen.size
            for index in members:
                parts = []
                for rank, counts in enumerate(rows):
                    end = begins[rank] + counts[index] * widths[index]
                    parts.append(block[rank, begins[rank] : end])
                    begins[rank] = end
                shape = (sum(counts[index] for counts in rows), *tensors[index].shape[1:])
                # If there is only one tensor, and no padding, the block is the result, and no copy is needed.
                is_whole = len(members) == 1 and block.numel() == sum(map(torch.numel, parts))
                outputs[index] = _shaped(block.view(-1) if is_whole else torch.cat(parts), shape)

        finishers.append(unpack)

    def finish() -> list[torch.Tensor]:
        for unpack in finishers:
            unpack()
        return outputs

    pending = PendingResult(works, finish)
    return pending if async_op else pending.wait()


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: torch.Tensor) -> Any:
        ctx.group = group
        ctx.counts = [tensor.shape[0] for tensor in tensors]
        return tuple(all_gather_rows_coalesced(tensors, group))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        rows = all_gather_rows(torch.tensor([ctx.counts], device=gradients[0].device), ctx.group).tolist()
        mine = []
        for index, total in enumerate(all_reduce_copy_coalesced(gradients, ReduceOp.SUM, ctx.group)):
            begin = sum(counts[index] for counts in rows[: ctx.group.rank])
            mine.append(total.narrow(0, begin, ctx.counts[index]))
        return (None, *mine)


# ---- reduce_scatter ----


def row_shares(rows: int, size: int) -> list[int]:
    """Divide `rows` among `size` ranks. The first `rows % size` ranks get one row more. A pure function."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def reduce_scatter_rows(
    tensor: torch.Tensor,
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Any:
    """Combine the tensors of all ranks, and return this rank's share of the result's rows as a new tensor.

    Autograd works for SUM and AVG: backward gathers the gradients of all shares on every rank. If `op` is neither SUM nor AVG,
    backward raises an `InvalidArgumentError`.

    Args:
        tensor: at least one dimension. Its shape and dtype are the same on every rank. Only read.
        op: see `ReduceOp`.
        group: None means the default group.
        async_op: if true, return a `PendingResult` of the new tensor at once. Then autograd does not work.
        prescale: see `all_reduce_copy`.
        postscale: see `all_reduce_copy`.

    Returns:
        This rank's rows. If the number of rows is not a multiple of the number of ranks, the first ranks get one row more than
            the last ranks. Then the call costs one `reduce` for each rank.
    """
    return _first(
        reduce_scatter_rows_coalesced([tensor], op, group, async_op, prescale=prescale, postscale=postscale), async_op=async_op
    )


def reduce_scatter_rows_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Any:
    """Combine several tensors as `reduce_scatter_rows` does, in fewer calls. Returns a list of new tensors.

    Tensors of the same dtype and device travel in one reduce_scatter. With `async_op`, the result is a `PendingResult` of the
    list.
    """
    chosen = resolve_group(group)
    checks.refuse_no_tensors("reduce_scatter_rows", chosen.place(), tensors=tensors)
    if not async_op and _needs_gradients(tensors):
        return list(_ReduceScatterRows.apply(chosen, op, prescale, postscale, *tensors))  # type: ignore[no-untyped-call]
    for tensor in tensors:
        _check_has_rows("reduce_scatter_rows", tensor, chosen)
    works: list[Work] = []
    outputs: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for members in _by_kind(tensors):
        pieces = [
            torch.split(scaled(tensors[i].detach(), prescale), row_shares(tensors[i].shape[0], chosen.size)) for i in members
        ]
        parts = [torch.cat([of_tensor[rank].reshape(-1) for of_tensor in pieces]) for rank in range(chosen.size)]
        output = torch.empty_like(parts[chosen.rank])
        works.append(chosen.reduce_scatter(output, parts, op, async_op=async_op))
        sizes = [of_tensor[chosen.rank].numel() for of_tensor in pieces]
        for index, part, of_tensor in zip(members, torch.split(output, sizes), pieces, strict=True):
            outputs[index] = _shaped(part, of_tensor[chosen.rank].shape)

    pending = PendingResult(works, lambda: [_scaled_again(output, postscale) for output in outputs])
    return pending if async_op else pending.wait()


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, op: Reduction, prescale: float, postscale: float, *tensors: torch.Tensor) -> Any:
        ctx.arguments = (group, from_torch(op) or op, prescale * postscale)
        return tuple(reduce_scatter_rows_coalesced(tensors, op, group, prescale=prescale, postscale=postscale))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group, op, factor = ctx.arguments
        _check_differentiable("reduce_scatter_rows", op, group)
        # With AVG, the forward has divided by the number of ranks, so the gradient must be divided, too.
        factor = factor / group.size if op is ReduceOp.AVG else factor
        gathered = all_gather_rows_coalesced([gradient * factor for gradient in gradients], group)
        return (None, None, None, None, *gathered)


# ---- broadcast ----


def broadcast_copy(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Return the tensor of one rank, the root, as a new tensor on every rank. Pass either `src` or `group_src`.

    Autograd works: the root gets the sum of all ranks' gradients, and other ranks get zeros.

    Args:
        tensor: the same shape and dtype on every rank; only read.
        src: the root, as a rank of the default group.
        group: None means the default group.
        async_op: if true, return a `PendingResult` of the new tensor at once. Then autograd does not work.
        group_src: the root, as a rank of the group.
    """
    chosen = resolve_group(group)
    root = rank_in(chosen, src, group_src)
    checks.refuse_no_tensors("broadcast_copy", chosen.place(), tensor=tensor)
    if not async_op and _needs_gradients([tensor]):
        return _Broadcast.apply(chosen, root, tensor)  # type: ignore[no-untyped-call]
    copy = scaled(tensor.detach(), 1.0)
    work = chosen.broadcast(copy, root, async_op=async_op)
    return PendingResult([work], lambda: copy) if async_op else copy


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.arguments = (group, root)
        copy: torch.Tensor = broadcast_copy(tensor, None, group, group_src=root)
        return copy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, _Reduce.apply(*ctx.arguments, gradients[0])  # type: ignore[no-untyped-call]


class _Reduce(torch.autograd.Function):
    """The backward of `_Broadcast`. This function has a backward itself, so that second derivatives work."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.arguments = (group, root)
        # Reduce a copy, because `reduce` overwrites the root's tensor.
        total = scaled(tensor, 1.0)
        group.reduce(total, root)
        return total if group.rank == root else torch.zeros_like(total)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group, root = ctx.arguments
        return None, None, broadcast_copy(gradients[0], None, group, group_src=root)


# ---- all_to_all ----


def all_to_all_rows(
    tensor: torch.Tensor, splits: Sequence[int] | None = None, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Send rows to each rank, and return the rows that this rank gets. A rank need not know how many rows it will get.

    Autograd works: the gradient of each row goes back to the rank that sent the row.

    Args:
        tensor: at least one dimension; only read. The dtype and all dimensions but the first are the same on every rank.
        splits: `splits[r]` is the number of rows for rank r. The first rows go to rank 0, the next rows to rank 1, and so on.
            None means equal numbers.
        group: None means the default group.
        async_op: if true, return a `PendingResult` of the pair. Then autograd does not work. The call still waits until the
            ranks have exchanged their numbers of rows.

    Returns:
        A pair: the received rows, in the order of the ranks that sent them; and a list with the number of rows from each rank.

    Cost: an all-to-all of 16 bytes for each pair of ranks, then an all-to-all of the rows.

    Raises:
        InvalidArgumentError: the splits do not add up to the number of rows. Or `splits` is None, and the number of rows is not
            a multiple of the number of ranks. Or the tensor has no dimension.
        DisagreementError: the dtypes differ, or dimensions other than the first differ. Every rank raises this error.
    """
    chosen = resolve_group(group)
    checks.refuse_no_tensors("all_to_all_rows", chosen.place(), tensor=tensor)
    _check_has_rows("all_to_all_rows", tensor, chosen)
    rows = tensor.shape[0]
    if splits is None and rows % chosen.size:
        raise InvalidArgumentError(
            f"all_to_all_rows on {chosen.place()}: {rows} rows cannot go to {chosen.size} ranks in equal parts; pass splits"
        )
    try:
        counts = [rows // chosen.size] * chosen.size if splits is None else [operator.index(count) for count in splits]
    except TypeError as error:
        raise InvalidArgumentError(
            f"all_to_all_rows on {chosen.place()}: expected a list of integers as splits, found {splits!r}"
        ) from error
    if len(counts) != chosen.size or min(counts) < 0 or sum(counts) != rows:
        raise InvalidArgumentError(
            f"all_to_all_rows on {chosen.place()}: expected {chosen.size} splits, none below 0, that add up to {rows} rows, "
            f"found {counts}"
        )
    if not async_op and _needs_gradients([tensor]):
        output, received = _AllToAllRows.apply(chosen, counts, tensor)  # type: ignore[no-untyped-call]
        return output, received.tolist()
    pending = _start_all_to_all(tensor.detach().contiguous(), counts, chosen, async_op)
    return pending if async_op else pending.wait()


def _start_all_to_all(
    tensor: torch.Tensor, counts: list[int], group: ProcessGroup, async_op: bool
) -> PendingResult[tuple[torch.Tensor, list[int]]]:
    device = object_exchange.message_device(group, tensor.device)
    told = torch.tensor([[count, _digest(tensor)] for count in counts], dtype=torch.int64, device=device)
    heard = torch.empty_like(told)
    group.all_to_all_single(heard, told)
    received, digests = (list(column) for column in zip(*heard.tolist(), strict=True))
    _check_same_rows("all_to_all_rows", digests, [tensor], group)
    output = tensor.new_empty(sum(received), *tensor.shape[1:])
    work = group.all_to_all_single(output, tensor, received, counts, async_op=async_op)
    return PendingResult([work], lambda: (output, received))


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, counts: list[int], tensor: torch.Tensor) -> Any:
        output, received = all_to_all_rows(tensor, counts, group)
        ctx.arguments = (received, group)
        splits = torch.tensor(received, device="cpu")
        ctx.mark_non_differentiable(splits)
        return output, splits

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        received, group = ctx.arguments
        return None, None, all_to_all_rows(gradients[0], received, group)[0]


# ---- objects ----


def broadcast_object(obj: Any, src: int | None = None, group: ProcessGroup | None = None, group_src: int | None = None) -> Any:
    """Return one rank's object on every rank. The object is sent as a pickle.

    Args:
        obj: the root's object, which must be picklable; ignored on other ranks.
        src: the root, a rank of the default group. Without `src` and `group_src`, the root is rank 0 of the group.
        group: None means the default group.
        group_src: the root, a rank of the group.
    """
    chosen = resolve_group(group)
    return object_exchange.broadcast_object(obj, rank_in(chosen, src, group_src, default=0), group=chosen)


# ---- shared by the functions above ----


def _first(results: Any, *, async_op: bool) -> Any:
    return _FirstOf(results) if async_op else results[0]


class _FirstOf(PendingResult[Any]):
    def __init__(self, results: PendingResult[list[Any]]) -> None:
        super().__init__((), lambda: results.wait()[0])
        self._results = results

    def is_completed(self) -> bool:
        return self._results.is_completed()


def _needs_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _by_kind(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    kinds: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    return list(kinds.values())


def _shaped(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    # Autograd lets no caller change a view in place. And views share a version counter, so a change of one result would look
    # like a change of the other results. `data` has the same memory, but is not a view, and has its own counter.
    return part.view(shape).data


def _width(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:])


def _rows_of_all(name: str, tensors: Sequence[torch.Tensor], group: ProcessGroup) -> list[list[int]]:
    """Gather the numbers of rows on all ranks. Returns a list for each rank, with the number of rows of each tensor."""
    for tensor in tensors:
        _check_has_rows(name, tensor, group)
    device = object_exchange.message_device(group, tensors[0].device)
    digest = crc32(b" ".join(str(_digest(tensor)).encode() for tensor in tensors))
    told = torch.tensor([digest, *(tensor.shape[0] for tensor in tensors)], dtype=torch.int64, device=device)
    heard = told.new_empty(group.size, told.numel())
    group.all_gather_into_tensor(heard, told)
    table = heard.tolist()
    _check_same_rows(name, [line[0] for line in table], tensors, group)
    return [line[1:] for line in table]


def _digest(tensor: torch.Tensor) -> int:
    return crc32(f"{tensor.dtype} {tuple(tensor.shape[1:])}".encode())


def _check_has_rows(name: str, tensor: torch.Tensor, group: ProcessGroup) -> None:
    if tensor.dim() == 0:
        raise InvalidArgumentError(f"{name} on {group.place()}: expected a tensor with rows, found one without a dimension")


def _check_same_rows(name: str, digests: Sequence[int], tensors: Sequence[torch.Tensor], group: ProcessGroup) -> None:
    others = [rank for rank, digest in enumerate(digests) if digest != digests[group.rank]]
    if others:
        mine = ", ".join(f"{tensor.dtype} with rows of shape {tuple(tensor.shape[1:])}" for tensor in tensors)
        raise DisagreementError(
            f"{name} on {group.place()}: expected the same dtypes and row shapes on every rank, found {mine} here and others "
            f"on rank(s) {', '.join(map(str, others))}; only the number of rows may differ"
        )


def _check_differentiable(name: str, op: Reduction, group: ProcessGroup) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise InvalidArgumentError(
            f"{name} on {group.place()}: the gradient of {op.name} is not defined; use SUM or AVG, or pass tensor.detach()"
        )
