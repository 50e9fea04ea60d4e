"""All-reduce of sparse tensors. Every rank gathers all elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from zlib import crc32

import torch

from ..engine.call import tensor_in_words
from ..health.statements import Statements, different_calls
from ..reduce_op import PremulSum, ReduceOp, Reduction, divide
from ..work import FinishedWork, FutureWork, TensorsFuture, Work, fail_future, following_future
from .layout import writing
from .reduction import accumulation_dtype

_SIGNATURE_BYTES = 512


class Gatherer(Protocol):
    """The methods of a process group that this module calls."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def has_total_order(self) -> bool:
        """See `ProcessGroup.has_total_order`."""

    def place(self) -> str:
        """This rank and the group in words, for errors."""

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False) -> Work:
        """See `ProcessGroup.all_gather`."""


def irreducible(tensor: torch.Tensor, op: Reduction) -> str | None:
    """Return an error text if `all_reduce` cannot reduce a sparse tensor by `op`, otherwise None."""
    # For bool, `checked_reduction` has replaced SUM by BOR, so an error about `op` would not name the caller's reduction.
    if tensor.dtype is torch.bool:
        return "a sparse tensor of dtype bool cannot be reduced; pass tensor.to_dense()"
    if not (isinstance(op, PremulSum) or op in (ReduceOp.SUM, ReduceOp.AVG)):
        return f"a sparse tensor can be reduced by SUM, AVG and premul_sum, found {op.name}; pass tensor.to_dense()"
    return None


def all_reduce(group: Gatherer, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
    """Add up the COO tensors of all ranks, in place. Every rank gets the same coalesced tensor, with the same bits.

    float16 and bfloat16 are added in float32, and rounded once. If a tensor has an index several times, its rank first adds up
    these elements, and rounds this sum, too.

    Args:
        group: the process group; all its ranks call this function.
        tensor: sparse COO, not `irreducible`. Every rank passes the same shape, dtype and number of sparse dimensions, and any
            elements.
        op: SUM, AVG or a `premul_sum`.
        async_op: if true, do not wait for the result. A group without a total order waits in any case.

    Raises:
        DisagreementError: shape, dtype, number of sparse dimensions or `op` differ. All ranks raise this error.

    Cost: three all-gathers: of the element counts, the indices and the values, padded to the largest count.
    """
    mine = tensor.detach().to(accumulation_dtype(tensor.dtype)).coalesce().to(tensor.dtype)
    signature = f"all_reduce(sparse {tensor_in_words(mine)} with {mine.sparse_dim()} sparse dimension(s), op={op.name})"
    head = torch.tensor([mine.values().shape[0], crc32(signature.encode())], device=tensor.device)
    heads = [torch.empty_like(head) for _ in range(group.size)]

    def gather_elements() -> None:
        counts, digests = zip(*[entry.tolist() for entry in heads], strict=True)
        # Every rank sees the same digests, so either all ranks take this branch or none does.
        if len(set(digests)) > 1:
            raise different_calls(Statements.of(_gather_signatures(group, signature, tensor.device)))
        with writing(tensor):
            tensor.copy_(_total(group, mine, list(counts), op))

    # The later all-gathers depend on the first one. Without a total order, a callback must not issue them: on one rank they
    # could come before another collective of the program, and on another rank after it.
    if not group.has_total_order:
        group.all_gather(heads, head)
        gather_elements()
        return FinishedWork([tensor])

    gathered = group.all_gather(heads, head, async_op=True).get_future()
    future = following_future(gathered, [tensor])

    def finish(done: TensorsFuture) -> None:
        # torch's `then` would keep only the text of an error.
        try:
            done.value()
            gather_elements()
        except BaseException as error:  # noqa: BLE001 - the future's waiters must get it
            fail_future(future, error)
        else:
            future.set_result([tensor])

    gathered.add_done_callback(finish)
    work = FutureWork(future, [tensor], lambda: f"all_reduce of a sparse tensor on {group.place()}")
    if not async_op:
        work.wait()
    return work


def _total(group: Gatherer, mine: torch.Tensor, counts: list[int], op: Reduction) -> torch.Tensor:
    """Gather the elements of all ranks, and return their sum or mean.

    In a group with a total order, a callback of the first all-gather calls this function. See Note [One total order] in
    `engine.queue`.
    """
    values, wide = mine.values(), accumulation_dtype(mine.dtype)
    if isinstance(op, PremulSum):
        values = values.to(wide) * op.factor
    all_indices = _gather_rows(group, mine.indices().t(), counts)
    all_values = _gather_rows(group, values, counts)
    gathered = torch.sparse_coo_tensor(all_indices.t(), all_values, mine.shape, check_invariants=True, device=mine.device)
    total = gathered.to(wide).coalesce()
    if op is ReduceOp.AVG:
        divide(total.values(), group.size)
    return total.to(mine.dtype)


def _gather_signatures(group: Gatherer, signature: str, device: torch.device) -> list[str]:
    padded = signature.encode()[:_SIGNATURE_BYTES].ljust(_SIGNATURE_BYTES)
    line = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    lines = [torch.empty_like(line) for _ in range(group.size)]
    group.all_gather(lines, line)
    return [bytes(row.tolist()).decode(errors="replace").strip() for row in lines]


def _gather_rows(group: Gatherer, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    group.all_gather(gathered, padded)
    return torch.cat([entry[:count] for entry, count in zip(gathered, counts, strict=True)])
