"""Programs whose ranks disagree: the catalogue that `test_desync_mpi.py` runs.

In each program the rank that `odd` is true for does something else than the others. `numel` is the number of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from syncline.collectives import ProcessGroup, ReduceOp, SynclineError, premul_sum
from syncline.collectives.contract.reduce_op import Reduction

Body: TypeAlias = Callable[[ProcessGroup, bool, int], object]

NOT_OURS = "not ours: "
#: Said for a rank whose process the library ended.
ENDED = "ended by the library"
#: Numbers of elements: below and above the size from which MPI's ranks compare calls.
NUMELS = {"small": 3, "large": 40_000}
TIMEOUT_S = 0.5

F32, F64, I32, F16, BF16 = torch.float32, torch.float64, torch.int32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Program:
    """One kind of disagreement.

    Attributes:
        body: what each rank does.
        some_rank: only one of the ranks can know (a sender cannot know what its receiver expects); else all are told.
        garbles: the ranks hand the library messages of different sizes for one another. It may end the process where nobody
            compares the calls before: loud, but in the library's words.
    """

    body: Body
    some_rank: bool = False
    garbles: bool = False


def ones(numel: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """What is sent: the values do not matter."""
    return torch.ones(numel, dtype=dtype)


# ---- one call of each collective; `dtype`, `root` and `op` where it has them ----


def all_reduce(group: ProcessGroup, numel: int, dtype: torch.dtype = F32, op: Reduction = ReduceOp.SUM) -> None:
    group.all_reduce(ones(numel, dtype), op)


def reduce(group: ProcessGroup, numel: int, dtype: torch.dtype = F32, root: int = 0, op: Reduction = ReduceOp.SUM) -> None:
    group.reduce(ones(numel, dtype), root, op)


def broadcast(group: ProcessGroup, numel: int, dtype: torch.dtype = F32, root: int = 0) -> None:
    group.broadcast(ones(numel, dtype), root)


def all_gather(group: ProcessGroup, numel: int, dtype: torch.dtype = F32) -> None:
    group.all_gather([ones(numel, dtype) for _ in range(group.size)], ones(numel, dtype))


def all_gather_into_tensor(group: ProcessGroup, numel: int, dtype: torch.dtype = F32) -> None:
    group.all_gather_into_tensor(ones(group.size * numel, dtype), ones(numel, dtype))


def gather(group: ProcessGroup, numel: int, dtype: torch.dtype = F32, root: int = 0) -> None:
    outputs = [ones(numel, dtype) for _ in range(group.size)] if group.rank == root else None
    group.gather(ones(numel, dtype), outputs, root)


def scatter(group: ProcessGroup, numel: int, dtype: torch.dtype = F32, root: int = 0) -> None:
    inputs = [ones(numel, dtype) for _ in range(group.size)] if group.rank == root else None
    group.scatter(ones(numel, dtype), inputs, root)


def reduce_scatter(group: ProcessGroup, numel: int, dtype: torch.dtype = F32, op: Reduction = ReduceOp.SUM) -> None:
    group.reduce_scatter(ones(numel, dtype), [ones(numel, dtype) for _ in range(group.size)], op)


def reduce_scatter_tensor(group: ProcessGroup, numel: int, dtype: torch.dtype = F32, op: Reduction = ReduceOp.SUM) -> None:
    group.reduce_scatter_tensor(ones(numel, dtype), ones(group.size * numel, dtype), op)


def all_to_all(group: ProcessGroup, numel: int, dtype: torch.dtype = F32) -> None:
    group.all_to_all([ones(numel, dtype) for _ in range(group.size)], [ones(numel, dtype) for _ in range(group.size)])


def all_to_all_single(group: ProcessGroup, numel: int, dtype: torch.dtype = F32) -> None:
    group.all_to_all_single(ones(group.size * numel, dtype), ones(group.size * numel, dtype))


def barrier(group: ProcessGroup, numel: int) -> None:  # noqa: ARG001 - as the others
    group.barrier()


def allocate(group: ProcessGroup, numel: int) -> None:
    group.allocate(numel, F32)


Call = Callable[..., None]
MOVES: tuple[Call, ...] = (
    broadcast,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
)
REDUCTIONS: tuple[Call, ...] = (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor)
ROOTED: tuple[Call, ...] = (reduce, broadcast, gather, scatter)


# ---- kinds of disagreement ----


def other_dtype(call: Call, usual: torch.dtype, other: torch.dtype) -> Body:
    return lambda group, odd, numel: call(group, numel, other if odd else usual)


def other_numel(call: Call, more: int) -> Body:
    return lambda group, odd, numel: call(group, numel + more * odd)


def other_root(call: Call) -> Body:
    return lambda group, odd, numel: call(group, numel, root=int(odd))


def other_op(call: Call, usual: Reduction, other: Reduction, dtype: torch.dtype = F32) -> Body:
    return lambda group, odd, numel: call(group, numel, dtype, op=other if odd else usual)


def other_call(usual: Call, other: Call) -> Body:
    return lambda group, odd, numel: (other if odd else usual)(group, numel)


def extra_call(call: Call) -> Body:
    def body(group: ProcessGroup, odd: bool, numel: int) -> None:
        call(group, numel)
        if odd:
            call(group, numel)

    return body


def skipped_call(skipped: Call) -> Body:
    """In the middle, so that the rank is one call ahead from there on."""

    def body(group: ProcessGroup, odd: bool, numel: int) -> None:
        all_reduce(group, numel)
        if not odd:
            skipped(group, numel)
        all_reduce(group, numel)

    return body


def swapped(first: Call, second: Call) -> Body:
    def body(group: ProcessGroup, odd: bool, numel: int) -> None:
        for call in (second, first) if odd else (first, second):
            call(group, numel)

    return body


def in_flight(usual: Reduction, other: Reduction) -> Body:
    """All are issued before the first is waited for."""

    def body(group: ProcessGroup, odd: bool, numel: int) -> None:
        ops = [usual, usual, other if odd else usual, usual]
        works = [group.all_reduce(ones(numel), op, async_op=True) for op in ops]
        for work in works:
            work.wait()

    return body


def from_callback(group: ProcessGroup, odd: bool, numel: int) -> None:
    """The callback on one rank issues another collective."""
    work = group.all_reduce(ones(numel), async_op=True)
    work.get_future().then(lambda _: (all_reduce if odd else broadcast)(group, numel))
    work.wait()


def all_to_all_single_splits(group: ProcessGroup, odd: bool, numel: int) -> None:
    """The odd rank sends one row less to the first rank and one more to the last; nobody expects that."""
    rows = [numel] * group.size
    sends = [numel - 1, *rows[1:-1], numel + 1] if odd else rows
    group.all_to_all_single(ones(sum(rows)), ones(sum(sends)), rows, sends)


def all_to_all_sends_less(group: ProcessGroup, odd: bool, numel: int) -> None:
    inputs = [ones(numel - odd) for _ in range(group.size)]
    group.all_to_all([ones(numel) for _ in range(group.size)], inputs)


def all_to_all_expects_less(group: ProcessGroup, odd: bool, numel: int) -> None:
    outputs = [ones(numel - odd) for _ in range(group.size)]
    group.all_to_all(outputs, [ones(numel) for _ in range(group.size)])


def transfer(sent: Callable[[int], torch.Tensor], expected: Callable[[int], torch.Tensor], *, tag: int = 0) -> Body:
    """Rank 0 sends to rank 1, which expects something else."""

    def body(group: ProcessGroup, odd: bool, numel: int) -> None:  # noqa: ARG001 - as the others
        if group.rank == 0:
            group.send(sent(numel), 1)
        elif group.rank == 1:
            group.recv(expected(numel), 0, tag)

    return body


def catalogue() -> Mapping[str, Program]:
    """Every program, by a name that says what differs."""
    found: dict[str, Program] = {}
    for call in (*REDUCTIONS, *MOVES):
        name = call.__name__
        found[f"{name}: float32 and int32"] = Program(other_dtype(call, F32, I32))
        found[f"{name}: float16 and bfloat16"] = Program(other_dtype(call, F16, BF16))
        found[f"{name}: one element more"] = Program(other_numel(call, 1), garbles=True)
    for call in (all_reduce, broadcast):
        found[f"{call.__name__}: float32 and float64"] = Program(other_dtype(call, F32, F64), garbles=True)
        found[f"{call.__name__}: one element less"] = Program(other_numel(call, -1), garbles=True)
    for call in ROOTED:
        found[f"{call.__name__}: another root"] = Program(other_root(call))
    for call in REDUCTIONS:
        found[f"{call.__name__}: SUM and AVG"] = Program(other_op(call, ReduceOp.SUM, ReduceOp.AVG))
        found[f"{call.__name__}: SUM and MAX"] = Program(other_op(call, ReduceOp.SUM, ReduceOp.MAX))
    found["all_reduce: another factor"] = Program(other_op(all_reduce, premul_sum(2.0), premul_sum(3.0)))
    found["all_reduce: SUM and a factor"] = Program(other_op(all_reduce, ReduceOp.SUM, premul_sum(3.0)))
    found["all_reduce: BAND and BOR"] = Program(other_op(all_reduce, ReduceOp.BAND, ReduceOp.BOR, I32))
    for usual, other in (
        (all_reduce, broadcast),
        (all_reduce, barrier),
        (all_reduce, all_gather_into_tensor),
        (all_reduce, reduce_scatter_tensor),
        (all_reduce, reduce),
        (broadcast, reduce),
        (broadcast, barrier),
        (broadcast, scatter),
        (gather, scatter),
        (gather, reduce),
        (all_gather, all_to_all),
        (all_gather, gather),
        (allocate, all_reduce),
    ):
        found[f"{usual.__name__}, but {other.__name__} on one rank"] = Program(other_call(usual, other), garbles=True)
    for call in (all_reduce, broadcast, reduce, all_gather, all_to_all, barrier):
        found[f"{call.__name__}: once more at the end"] = Program(extra_call(call), some_rank=call is barrier, garbles=True)
        found[f"{call.__name__}: skipped in the middle"] = Program(skipped_call(call), garbles=True)
    for first, second in ((all_reduce, broadcast), (all_reduce, reduce), (broadcast, barrier), (all_gather, all_to_all)):
        found[f"{first.__name__} and {second.__name__} swapped"] = Program(swapped(first, second), garbles=True)
    found["in flight: SUM and AVG"] = Program(in_flight(ReduceOp.SUM, ReduceOp.AVG))
    found["another collective in a callback"] = Program(from_callback, garbles=True)
    found["all_to_all_single: other splits"] = Program(all_to_all_single_splits)
    found["all_to_all: one rank sends less"] = Program(all_to_all_sends_less)
    found["all_to_all: one rank expects less"] = Program(all_to_all_expects_less)
    found["recv: float32 and int32"] = Program(transfer(ones, lambda numel: ones(numel, I32)), some_rank=True)
    found["recv: one element more"] = Program(transfer(ones, lambda numel: ones(numel + 1)), some_rank=True)
    found["recv: one element less"] = Program(transfer(ones, lambda numel: ones(numel - 1)), some_rank=True)
    found["recv: another tag"] = Program(transfer(ones, ones, tag=1), some_rank=True)
    return found


def outcome(group: ProcessGroup, program: Program, numel: int) -> str:
    """The error that this rank gets, in words; empty if there is none until all ranks have met at a barrier, and left."""
    try:
        program.body(group, group.rank == 1, numel)
        group.barrier()
        group.close()
    except SynclineError as error:
        group.abort()
        return f"{type(error).__name__}: {error}"
    except BaseException as error:  # noqa: BLE001 - the verdict on it is below
        group.abort()
        return f"{NOT_OURS}{type(error).__name__}: {error}"
    return ""


def problem(program: Program, said: Sequence[str]) -> str | None:
    """What is wrong with what the ranks were told, by rank; None if nothing is."""
    told = [text for text in said if text]
    if not told or (len(told) < len(said) and not program.some_rank):
        return "silent"
    if ENDED in told:
        return None if program.garbles else "the process was ended"
    if any(text.startswith(NOT_OURS) for text in told):
        return "an error that is not ours"
    if not any(f"rank {rank}" in text for text in told for rank in range(len(said))):
        return "no rank is named"
    return None


def same_signature_swapped(group: ProcessGroup, odd: bool, numel: int) -> list[float]:
    """Two calls that nothing tells apart, in another order on one rank: not seen. What comes of it, first of each."""
    first, second = torch.full((numel,), 1.0), torch.full((numel,), 10.0)
    for tensor in (second, first) if odd else (first, second):
        group.all_reduce(tensor)
    return [first[0].item(), second[0].item()]
