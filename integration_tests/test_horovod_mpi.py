"""`syncline.horovod` over real ranks: every operation of Horovod's torch API, its optimizer, join, and state."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import syncline.horovod as hvd
from syncline.collectives import DisagreementError, InvalidArgumentError, MisuseError, ProcessGroup
from test_support.desync_programs import as_default
from test_support.full_run import FULL
from test_support.random_horovod import draw, play

pytestmark = pytest.mark.mpi

DTYPES = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def job(mpi_group: ProcessGroup) -> Iterator[None]:
    """All tests share a group, which is faster than one for each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with as_default(mpi_group):
        hvd.init()
        yield
        hvd.shutdown()
    torch.set_num_threads(threads)


def mine(rank: int, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (3, 2)) -> torch.Tensor:
    """Small integers, which every dtype adds exactly; they depend on rank and index."""
    numbers = torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float64)
    return ((numbers * (rank + 1)) % 7 + rank).reshape(shape).to(dtype)


def all_ranks(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (3, 2)) -> list[torch.Tensor]:
    return [mine(rank, dtype, shape) for rank in range(hvd.size())]


def check(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert torch.equal(result, expected), (result, expected)


# ---- who is where ----


def test_ranks_and_nodes(mpi_group: ProcessGroup) -> None:
    assert (hvd.rank(), hvd.size()) == (mpi_group.rank, mpi_group.size)
    if hvd.rank() == hvd.size() - 1:  # it may be called on one rank only
        assert (hvd.local_rank(), hvd.local_size()) == (mpi_group.rank, mpi_group.size)
        assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.mpi_enabled()
    assert hvd.is_initialized()


def test_after_shutdown_init_begins_anew(mpi_group: ProcessGroup) -> None:
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(RuntimeError, match=r"hvd\.init"):
        hvd.rank()
    hvd.init()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [mpi_group.size] * 2


# ---- allreduce ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce(dtype: torch.dtype) -> None:
    inputs = all_ranks(dtype)
    total = torch.stack([each.double() for each in inputs]).sum(0)
    tensor = mine(hvd.rank(), dtype)
    before = tensor.clone()
    check(hvd.allreduce(tensor, op=hvd.Sum), total.to(dtype))
    average = total / hvd.size()
    if not dtype.is_floating_point:
        average = average.trunc()
    torch.testing.assert_close(hvd.allreduce(tensor, name="any"), average.to(dtype), rtol=1e-3, atol=0)
    check(hvd.allreduce(tensor, op=hvd.Min), torch.stack(inputs).amin(0))
    check(hvd.allreduce(tensor, op=hvd.Max), torch.stack(inputs).amax(0))
    small = torch.full((5,), 2 if hvd.rank() else 3, dtype=dtype)
    check(hvd.allreduce(small, op=hvd.Product), torch.full((5,), 3 * 2 ** (hvd.size() - 1), dtype=dtype))
    check(tensor, before)


def test_allreduce_in_place_and_asynchronous() -> None:
    total = torch.stack(all_ranks()).sum(0)
    tensor = mine(hvd.rank())
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    check(tensor, total)
    tensors = [mine(hvd.rank()) * factor for factor in range(1, 20)]
    handles = [hvd.allreduce_async(each, op=hvd.Sum) for each in tensors]
    in_place = [each.clone() for each in tensors]
    handles += [hvd.allreduce_async_(each, op=hvd.Sum, postscale_factor=2.0) for each in in_place]
    results = [hvd.synchronize(handle) for handle in handles]
    assert all(hvd.poll(handle) for handle in handles)
    for factor in range(1, 20):
        check(tensors[factor - 1], mine(hvd.rank()) * factor)
        check(results[factor - 1], total * factor)
        assert results[19 + factor - 1] is in_place[factor - 1]
        check(in_place[factor - 1], total * factor * 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.float64], ids=str)
def test_allreduce_scales_before_and_after(dtype: torch.dtype) -> None:
    def times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
        return (tensor.double() * factor).to(dtype)  # integers are rounded towards zero

    scaled = torch.stack([times(each, 0.75).double() for each in all_ranks(dtype)]).sum(0).to(dtype)
    tensor = mine(hvd.rank(), dtype)
    check(hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.75), scaled)
    total = torch.stack([each.double() for each in all_ranks(dtype)]).sum(0).to(dtype)
    check(hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=0.75), times(total, 0.75))
    check(hvd.allreduce_(tensor.clone(), op=hvd.Sum, prescale_factor=0.75), scaled)


def test_grouped_allreduce_of_several_dtypes() -> None:
    def group_of(rank: int) -> list[torch.Tensor]:
        return [mine(rank, dtype, shape) for dtype, shape in zip(DTYPES[2:], [(3,), (2, 2), (5, 1), (1,), (4,)], strict=True)]

    expected = [
        torch.stack([each.double() for each in same]).sum(0) for same in zip(*map(group_of, range(hvd.size())), strict=True)
    ]
    tensors = group_of(hvd.rank())
    for results in (
        hvd.grouped_allreduce(tensors, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum)),
        hvd.grouped_allreduce_(tensors, op=hvd.Sum),
    ):
        for result, total, tensor in zip(results, expected, tensors, strict=True):
            check(result, total.to(tensor.dtype))


def test_compression_travels_as_float16_and_comes_back() -> None:
    tensor = mine(hvd.rank()) + 1 / 3
    expected = torch.stack([(each + 1 / 3).half().float() for each in all_ranks()]).sum(0).half().double()
    check(hvd.allreduce(tensor, op=hvd.Sum, compression=hvd.Compression.fp16), expected)
    check(
        hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Sum, compression=hvd.Compression.fp16),
        torch.full((2,), hvd.size(), dtype=torch.int32),
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda: hvd.allreduce(1.5),
        lambda: hvd.allreduce_([1.5]),
        lambda: hvd.grouped_allreduce(torch.ones(2)),
        lambda: hvd.grouped_allreduce_async(None),
        lambda: hvd.grouped_allreduce_([torch.ones(2), 1.5]),
        lambda: hvd.sparse_allreduce_async([1.0]),
        lambda: hvd.allgather("text"),
        lambda: hvd.broadcast(1.5, 0),
        lambda: hvd.broadcast_(None, 0),
        lambda: hvd.broadcast_async(torch.ones(2), "0"),
        lambda: hvd.alltoall([1, 2]),
        lambda: hvd.reducescatter(None),
    ],
)
def test_what_is_no_tensor_is_refused_before_the_others_hear_of_the_call(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected (a torch\.Tensor|a list of tensors|one of the ranks)"):
        call()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_gradients_go_through_an_allreduce(op: Any) -> None:
    tensor = mine(hvd.rank()).requires_grad_()
    weights = mine(hvd.rank() + 5)
    (hvd.allreduce(tensor, op=op) * weights).sum().backward()
    total = torch.stack([mine(rank + 5) for rank in range(hvd.size())]).sum(0)
    torch.testing.assert_close(tensor.grad, total if op is hvd.Sum else total / hvd.size())
    first, second = mine(hvd.rank()).requires_grad_(), mine(hvd.rank()).requires_grad_()
    results = hvd.grouped_allreduce([first, second], op=op, prescale_factor=2.0)
    (results[0] * weights + results[1] * 3 * weights).sum().backward()
    torch.testing.assert_close(second.grad, 6 * (total if op is hvd.Sum else total / hvd.size()))
    torch.testing.assert_close(first.grad, 2 * (total if op is hvd.Sum else total / hvd.size()))


def test_a_gradient_that_is_not_defined_is_refused() -> None:
    tensor = mine(hvd.rank()).requires_grad_()
    with pytest.raises(InvalidArgumentError, match="MAX is not defined"):
        hvd.allreduce(tensor, op=hvd.Max).sum().backward()


def adasum_by_numpy(vectors: list[np.ndarray]) -> np.ndarray:
    """In pairs, then pairs of pairs. Vectors beyond a power of two are first added to the first ones."""

    def combine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (1 - a @ b / (2 * (a @ a))) * a + (1 - a @ b / (2 * (b @ b))) * b

    power = 2 ** (len(vectors).bit_length() - 1)
    for extra in range(power, len(vectors)):
        vectors[extra - power] = combine(vectors[extra - power], vectors[extra])
    vectors = vectors[:power]
    while len(vectors) > 1:
        vectors = [combine(a, b) for a, b in itertools.pairwise(vectors)][::2]
    return vectors[0]


def test_adasum_is_the_formula_of_the_paper() -> None:
    generator = np.random.default_rng(3)
    vectors = [generator.normal(size=11) for _ in range(hvd.size())]
    result = hvd.allreduce(torch.from_numpy(vectors[hvd.rank()].copy()), op=hvd.Adasum)
    np.testing.assert_allclose(result.numpy(), adasum_by_numpy(list(vectors)), rtol=1e-12)
    assert len({str(each.tolist()) for each in hvd.allgather_object(result)}) == 1  # bitwise
    check(hvd.allreduce(torch.full((3,), 2.0), op=hvd.Adasum), torch.full((3,), 2.0))  # equal: the mean
    apart = torch.zeros(hvd.size())
    apart[hvd.rank()] = 1.0
    check(hvd.allreduce(apart, op=hvd.Adasum), torch.ones(hvd.size()))  # orthogonal: the sum
    check(hvd.allreduce(torch.zeros(4), op=hvd.Adasum), torch.zeros(4))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_sparse_allreduce(op: Any) -> None:
    def sparse(rank: int) -> torch.Tensor:
        indices = torch.tensor([[rank, rank + 1, rank]])
        return torch.sparse_coo_tensor(indices, mine(rank, torch.float32, (3, 2)), (hvd.size() + 1, 2), check_invariants=True)

    result = hvd.synchronize(hvd.sparse_allreduce_async(sparse(hvd.rank()), name="s", op=op))
    total = torch.stack([sparse(rank).to_dense() for rank in range(hvd.size())]).sum(0)
    torch.testing.assert_close(result.to_dense(), total / hvd.size() if op is hvd.Average else total)


# ---- allgather, broadcast, alltoall, reducescatter ----


def rows_of(rank: int, offset: int = 0) -> int:
    """Another number of rows on each rank, and none on one of them."""
    return (2 * rank + offset) % 5


def test_allgather_of_different_numbers_of_rows() -> None:
    for dtype, offset in itertools.product(DTYPES, (0, 1)):
        tensors = [mine(rank, dtype, (rows_of(rank, offset), 2)) for rank in range(hvd.size())]
        check(hvd.allgather(tensors[hvd.rank()]), torch.cat(tensors))
        check(hvd.synchronize(hvd.allgather_async(tensors[hvd.rank()])), torch.cat(tensors))
    check(hvd.allgather(mine(hvd.rank())), torch.cat(all_ranks()))
    check(hvd.allgather(mine(hvd.rank()).t()), torch.cat([each.t() for each in all_ranks()]))


def test_grouped_allgather() -> None:
    def group_of(rank: int) -> list[torch.Tensor]:
        return [
            mine(rank, torch.float32, (rows_of(rank), 2)),
            mine(rank + 3, torch.int64, (2,)),
            mine(rank + 4, torch.float32, (rows_of(rank, 3), 1, 3)),
        ]

    expected = [torch.cat(same) for same in zip(*map(group_of, range(hvd.size())), strict=True)]
    for results in (
        hvd.grouped_allgather(group_of(hvd.rank())),
        hvd.synchronize(hvd.grouped_allgather_async(group_of(hvd.rank()))),
    ):
        for result, tensor in zip(results, expected, strict=True):
            check(result, tensor)


def test_allgather_of_rows_that_differ_is_an_error_on_every_rank() -> None:
    odd = hvd.rank() == hvd.size() - 1
    if hvd.size() == 1:
        return
    with pytest.raises(RuntimeError, match="same dtypes and row shapes"):
        hvd.allgather(torch.ones(2, 3 if odd else 4))
    with pytest.raises(RuntimeError, match="same dtypes and row shapes"):
        hvd.allgather(torch.ones(2, dtype=torch.float64 if odd else torch.float32))
    with pytest.raises(InvalidArgumentError, match="without a dimension"):
        hvd.allgather(torch.tensor(1.0))


def test_gradients_of_an_allgather_are_averaged() -> None:
    rows = [rows_of(rank, 1) for rank in range(hvd.size())]
    tensor = mine(hvd.rank(), shape=(rows[hvd.rank()], 2)).requires_grad_()
    weights = [mine(rank, shape=(sum(rows), 2)) for rank in range(hvd.size())]
    (hvd.allgather(tensor) * weights[hvd.rank()]).sum().backward()
    begin = sum(rows[: hvd.rank()])
    expected = torch.stack(weights).mean(0)[begin : begin + rows[hvd.rank()]]
    torch.testing.assert_close(tensor.grad, expected)


def test_broadcast() -> None:
    for root, dtype in itertools.product(range(hvd.size()), [*DTYPES, torch.bool]):
        tensor = mine(hvd.rank(), dtype)
        check(hvd.broadcast(tensor, root), mine(root, dtype))
        check(tensor, mine(hvd.rank(), dtype))
        check(hvd.synchronize(hvd.broadcast_async(tensor, root)), mine(root, dtype))
        assert hvd.broadcast_(tensor, root) is tensor
        check(tensor, mine(root, dtype))
    with pytest.raises(InvalidArgumentError, match=r"root_rank|is not in group"):
        hvd.broadcast(tensor, hvd.size())


def test_gradients_of_a_broadcast_are_averaged_on_the_root() -> None:
    root = hvd.size() - 1
    tensor = mine(hvd.rank()).requires_grad_()
    (hvd.broadcast(tensor, root) * mine(hvd.rank())).sum().backward()
    mean = torch.stack(all_ranks()).mean(0)
    torch.testing.assert_close(tensor.grad, mean if hvd.rank() == root else torch.zeros_like(mean))


def splits_of(rank: int) -> list[int]:
    return [(rank + 2 * peer) % 4 for peer in range(hvd.size())]


def sent(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return mine(rank, dtype, (sum(splits_of(rank)), 2))


def test_alltoall_with_splits_that_only_the_sender_knows() -> None:
    for dtype in DTYPES:
        expected = torch.cat([torch.split(sent(rank, dtype), splits_of(rank))[hvd.rank()] for rank in range(hvd.size())])
        received = [splits_of(rank)[hvd.rank()] for rank in range(hvd.size())]
        splits = torch.tensor(splits_of(hvd.rank()), dtype=torch.int64)
        output, counts = hvd.alltoall(sent(hvd.rank(), dtype), splits)
        check(output, expected)
        check(counts, torch.tensor(received))
        output, counts = hvd.synchronize(hvd.alltoall_async(sent(hvd.rank(), dtype), splits_of(hvd.rank())))
        check(output, expected)
        assert counts.tolist() == received
    even = torch.arange(2 * hvd.size()) + 100 * hvd.rank()
    parts = [torch.arange(2) + 2 * hvd.rank() + 100 * rank for rank in range(hvd.size())]
    check(hvd.alltoall(even), torch.cat(parts))


def test_alltoall_refuses_splits_that_do_not_fit() -> None:
    for splits in ([1] * hvd.size(), [0.5] * hvd.size(), torch.ones(hvd.size()), [-1, *[5] * (hvd.size() - 1)]):
        with pytest.raises((InvalidArgumentError, TypeError)):
            hvd.alltoall(torch.ones(2 * hvd.size() + 1), splits)
    if hvd.size() > 1:
        with pytest.raises(InvalidArgumentError, match="equal parts"):
            hvd.alltoall(torch.ones(2 * hvd.size() + 1))
    hvd.barrier()  # so that all are here before the first one begins


def test_gradients_of_an_alltoall_go_back() -> None:
    tensor = sent(hvd.rank()).requires_grad_()
    output, received = hvd.alltoall(tensor, splits_of(hvd.rank()))
    assert not received.requires_grad
    (output * (hvd.rank() + 1)).sum().backward()
    expected = torch.cat([torch.full((count, 2), rank + 1.0) for rank, count in enumerate(splits_of(hvd.rank()))])
    torch.testing.assert_close(tensor.grad, expected.double())


def shares(rows: int) -> list[int]:
    return [rows // hvd.size() + (rank < rows % hvd.size()) for rank in range(hvd.size())]


def test_reducescatter_of_rows_that_cannot_be_divided() -> None:
    for rows, dtype in itertools.product((2 * hvd.size(), 2 * hvd.size() + 1, 1), (torch.int32, torch.float32)):
        total = torch.stack([each.double() for each in all_ranks(dtype, (rows, 2))]).sum(0)
        expected = torch.split(total, shares(rows))[hvd.rank()]
        tensor = mine(hvd.rank(), dtype, (rows, 2))
        check(hvd.reducescatter(tensor, op=hvd.Sum), expected.to(dtype))
        check(hvd.synchronize(hvd.reducescatter_async(tensor, op=hvd.Sum)), expected.to(dtype))
        average = expected / hvd.size()
        average = average if dtype.is_floating_point else average.trunc()
        torch.testing.assert_close(hvd.reducescatter(tensor), average.to(dtype))
        halved = torch.stack([(each.double() * 0.5).to(dtype).double() for each in all_ranks(dtype, (rows, 2))]).sum(0)
        scaled = (torch.split(halved, shares(rows))[hvd.rank()] * 3).to(dtype)
        check(hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), scaled)
    with pytest.raises(InvalidArgumentError, match="without a dimension"):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(InvalidArgumentError, match="Adasum"):
        hvd.reducescatter(torch.ones(4), op=hvd.Adasum)


def test_grouped_reducescatter() -> None:
    shapes: list[tuple[int, ...]] = [(hvd.size(), 2), (hvd.size() + 1,), (2, 3)]

    def group_of(rank: int) -> list[torch.Tensor]:
        return [mine(rank, shape=shape) for shape in shapes]

    totals = [torch.stack(same).sum(0) for same in zip(*map(group_of, range(hvd.size())), strict=True)]
    for results in (
        hvd.grouped_reducescatter(group_of(hvd.rank()), op=hvd.Sum),
        hvd.synchronize(hvd.grouped_reducescatter_async(group_of(hvd.rank()), op=hvd.Sum)),
    ):
        for result, total in zip(results, totals, strict=True):
            check(result, torch.split(total, shares(total.shape[0]))[hvd.rank()])


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_gradients_of_a_reducescatter(op: Any) -> None:
    rows = 2 * hvd.size() + 1
    tensor = mine(hvd.rank(), shape=(rows, 2)).requires_grad_()
    (hvd.reducescatter(tensor, op=op) * (hvd.rank() + 1)).sum().backward()
    expected = torch.cat([torch.full((share, 2), rank + 1.0) for rank, share in enumerate(shares(rows))]).double()
    torch.testing.assert_close(tensor.grad, expected * hvd.size() if op is hvd.Sum else expected)


# ---- process sets, order, barrier ----


def test_process_sets() -> None:
    if hvd.size() == 1:
        return
    members = list(range(1, hvd.size()))
    others = hvd.add_process_set(hvd.ProcessSet(members))
    first = hvd.add_process_set([0])
    assert (others.size(), others.included()) == (len(members), hvd.rank() != 0)
    with pytest.raises(ValueError, match="again"):
        hvd.add_process_set(members)
    with pytest.raises(ValueError, match="again"):
        hvd.add_process_set(range(hvd.size()))
    chosen = first if hvd.rank() == 0 else others
    inputs = [mine(rank) for rank in chosen.ranks]
    check(hvd.allreduce(mine(hvd.rank()), op=hvd.Sum, process_set=chosen), torch.stack(inputs).sum(0))
    check(hvd.allgather(mine(hvd.rank()), process_set=chosen), torch.cat(inputs))
    root = chosen.ranks[-1]  # a rank among all
    check(hvd.broadcast(mine(hvd.rank()), root, process_set=chosen), mine(root))
    assert hvd.broadcast_object(f"rank {hvd.rank()}", root, process_set=chosen) == f"rank {root}"
    assert chosen.rank() == chosen.ranks.index(hvd.rank())
    hvd.barrier(chosen)
    with pytest.raises(MisuseError, match="not in group"):
        hvd.allreduce(torch.ones(1), process_set=first if hvd.rank() else others)
    assert hvd.remove_process_set(others)
    assert not hvd.remove_process_set(others)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert others.size() is None
    with pytest.raises(ValueError, match="was added"):
        hvd.allreduce(torch.ones(1), process_set=others)


def test_process_sets_of_communicators_that_were_split_before_init() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hvd.shutdown()
    halves = hvd.ProcessSet(world.Split(world.rank % 2, -world.rank))
    # One rank alone is the set of all ranks, which exists already.
    if world.size == 1:
        hvd.init()
        return
    hvd.init(process_sets=[halves])
    members = [rank for rank in range(hvd.size()) if rank % 2 == hvd.rank() % 2]
    assert halves.ranks == members
    check(hvd.allreduce(mine(hvd.rank()), op=hvd.Sum, process_set=halves), torch.stack([mine(rank) for rank in members]).sum(0))
    # All ranks know the sets of all ranks, so all of them raise the error.
    for first in range(2):
        with pytest.raises(ValueError, match="again"):
            hvd.add_process_set([*range(first, hvd.size(), 2)])
    # Rank 1's set exists already, if it is alone in its half. Then all ranks raise the error.
    if hvd.size() <= 3:
        with pytest.raises(ValueError, match="again"):
            hvd.add_process_set(hvd.ProcessSet(world.Split(hvd.rank(), 0)))
    assert hvd.remove_process_set(halves)
    # The last rank is in no communicator.
    first = hvd.add_process_set(hvd.ProcessSet(world.Split(MPI.UNDEFINED if hvd.rank() == hvd.size() - 1 else 0, 0)))
    assert first.included() == (hvd.rank() < hvd.size() - 1)
    if first.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first).tolist() == [hvd.size() - 1]
    hvd.barrier()


def test_shutdown_removes_process_sets() -> None:
    if hvd.size() == 1:
        return
    first = hvd.add_process_set([0])
    hvd.shutdown()
    hvd.init()
    assert first.size() is None
    with pytest.raises(ValueError, match="was added"):
        hvd.allreduce(torch.ones(1), process_set=first)
    hvd.add_process_set(first)
    if first.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first).tolist() == [1]


def test_empty_lists() -> None:
    assert hvd.grouped_allreduce([]) == []
    assert hvd.grouped_allreduce([], op=hvd.Adasum) == []
    assert hvd.grouped_allreduce_([]) == []
    assert hvd.grouped_allgather([]) == []
    assert hvd.grouped_reducescatter([]) == []
    assert hvd.synchronize(hvd.grouped_allreduce_async([])) == []
    assert hvd.synchronize(hvd.grouped_allgather_async([])) == []
    assert hvd.synchronize(hvd.grouped_reducescatter_async([])) == []
    hvd.barrier()


def test_an_order_that_differs_is_an_error_on_every_rank() -> None:
    if hvd.size() == 1:
        return

    def in_another_order() -> None:
        calls: list[Callable[[], object]] = [
            lambda: hvd.allreduce(torch.ones(3), name="a"),
            lambda: hvd.allreduce(torch.ones(4), name="b"),
        ]
        for call in calls if hvd.rank() else calls[::-1]:
            call()

    hvd.shutdown()
    with as_default(None):  # an error ends the group, so this test has its own, which `init` makes
        hvd.init()
        with pytest.raises(DisagreementError):
            in_another_order()
        hvd.shutdown()


# ---- join ----


def test_ranks_that_have_joined_add_zeros() -> None:
    for first in range(hvd.size()):
        for step in range(3):
            if hvd.rank() == first and step == 1:
                break
            tensor, numbers = mine(hvd.rank()) * (step + 1), mine(hvd.rank(), torch.int64)
            there = [rank for rank in range(hvd.size()) if rank != first or step == 0]
            expected = torch.stack([mine(rank) * (step + 1) for rank in there]).sum(0)
            results = [hvd.allreduce(tensor, op=hvd.Sum), *hvd.grouped_allreduce([tensor, numbers], op=hvd.Sum)]
            check(results[0], expected)
            check(results[1], expected)
            check(results[2], torch.stack([mine(rank, torch.int64) for rank in there]).sum(0))
            torch.testing.assert_close(hvd.synchronize(hvd.allreduce_async(tensor)), expected / hvd.size())
        last = hvd.join()
        assert hvd.size() == 1 or last != first
        assert hvd.allgather_object(last) == [last] * hvd.size()


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_ranks_that_have_joined_take_part_in_the_backward_of_an_allreduce(compression: Any) -> None:
    first, second = torch.ones(2, requires_grad=True), torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    for step in range(1 if hvd.rank() == 0 else 3):
        there = range(hvd.size() if step == 0 else hvd.size() - 1)
        integers = torch.tensor([1, 2])
        results = hvd.grouped_allreduce([integers, first, second], op=hvd.Sum, compression=compression)
        results[1] += 1  # the results are ordinary tensors
        (results[1].sum() * (hvd.size() - hvd.rank())).backward()  # the other result gets no gradient
        check(results[0], integers * len(there))
        assert first.grad is not None
        assert first.grad.tolist() == [float(sum(range(1, hvd.size() + (step == 0))))] * 2
        (gradient,) = torch.autograd.grad(hvd.allreduce(second, compression=compression).sum() * hvd.size(), second)
        assert gradient.tolist() == [[float(len(there))] * 2] * 3
        squares = hvd.allreduce(first.square(), op=hvd.Sum, compression=compression).square().sum()
        (gradient,) = torch.autograd.grad(squares, first, create_graph=True)
        (gradient,) = torch.autograd.grad(gradient.sum(), first)
        assert gradient.tolist() == [12.0 * len(there) ** 2] * 2
        first.grad = None
    assert hvd.size() == 1 or hvd.join() == hvd.size() - 1


def test_what_cannot_be_joined_is_an_error_and_does_no_harm() -> None:
    if hvd.size() > 1 and hvd.rank() != 0:
        for call in (
            lambda: hvd.allgather(torch.ones(2)),
            lambda: hvd.broadcast(torch.ones(2), 1),
            lambda: hvd.allreduce(torch.ones(2), op=hvd.Max),
            hvd.barrier,
        ):
            with pytest.raises(MisuseError, match="a rank has joined"):
                call()
    assert hvd.join() == hvd.size() - 1
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


# ---- the optimizer ----


def net(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 11), torch.nn.Tanh(), torch.nn.Linear(11, 2)]
    return torch.nn.Sequential(*layers).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator).double(), torch.randn(4, 2, generator=generator).double()


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return torch.nn.functional.mse_loss(model(inputs), targets)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def wrapped(model: torch.nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), **options)


def train_locally(model: torch.nn.Module, steps: int, *, passes: int = 1, factor: float = 1.0) -> torch.nn.Module:
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            losses = [loss_of(model, rank, passes * step + number) for rank in range(hvd.size())]
            (factor * torch.stack(losses).mean()).backward()
        optimizer.step()
    return model


def assert_same(model: torch.nn.Module, expected: torch.nn.Module, **tolerances: float) -> None:
    """Equal to the local training, and the same bits on every rank."""
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            parameter, other, **(tolerances or {"rtol": 1e-10, "atol": 1e-12}), msg=lambda text, name=name: f"{name}: {text}"
        )
    digests = hvd.allgather_object([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
    assert all(digest == digests[0] for digest in digests)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": 2},
    "predivided": {"gradient_predivide_factor": 3.0},
    "several-passes": {"backward_passes_per_step": 3},
    "sum": {"op": hvd.Sum},
    "sum-of-several-passes": {"op": hvd.Sum, "backward_passes_per_step": 2},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_optimizer_equals_local_training_on_the_whole_batch(options: dict[str, Any]) -> None:
    model = net(seed=hvd.rank())
    optimizer = wrapped(model, **options)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    passes = options.get("backward_passes_per_step", 1)
    for step in range(5):
        optimizer.zero_grad()
        for number in range(passes):
            loss_of(model, hvd.rank(), passes * step + number).backward()
        optimizer.step()
    factor = hvd.size() if options.get("op") is hvd.Sum else 1.0
    assert_same(model, train_locally(net(), 5, passes=passes, factor=factor))
    assert isinstance(optimizer, torch.optim.SGD)


def test_groups_of_parameters_share_buckets() -> None:
    model = net()
    layers = [model[0], model[2], model[4]]
    optimizer = wrapped(model, groups=[[layers[0].weight, layers[2].bias], [layers[1].weight]])
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    if hvd.size() > 1:
        buckets = [set(bucket.names) for bucket in optimizer._combining._reducer.buckets]
        assert {"0.weight", "4.bias"} in buckets
        assert {"2.weight"} in buckets
        assert len(buckets) == 5
    assert_same(model, train_locally(net(), 3))


def test_gradients_travel_as_float16() -> None:
    model = net()
    optimizer = wrapped(model, compression=hvd.Compression.fp16)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    assert_same(model, train_locally(net(), 4), rtol=1e-2, atol=1e-3)


def test_each_rank_may_use_other_parameters_and_what_nobody_uses_gets_zeros() -> None:
    torch.manual_seed(1)
    branches = torch.nn.ModuleList([torch.nn.Linear(2, 1) for _ in range(hvd.size() + 1)]).double()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(branches.parameters(), lr=0.1), branches.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        inputs = torch.full((1, 2), step + 1.0).double()
        branches[hvd.rank()](inputs).sum().backward()
        optimizer.synchronize()
        for branch in branches[:-1]:
            torch.testing.assert_close(branch.weight.grad, inputs / hvd.size())
        expected = torch.zeros(1, 2).double()
        assert hvd.size() == 1 or torch.equal(branches[-1].weight.grad, expected)
        with optimizer.skip_synchronize():
            optimizer.step()


def test_a_rank_without_a_backward_takes_part() -> None:
    for lazy in range(hvd.size()):
        model = net()
        optimizer = wrapped(model)
        for step in range(4):
            optimizer.zero_grad()
            if hvd.rank() != lazy or step % 2 == 0:
                loss_of(model, hvd.rank(), step).backward()
            optimizer.synchronize()
            there = [rank for rank in range(hvd.size()) if rank != lazy or step % 2 == 0]
            reference = copy.deepcopy(model)
            reference.zero_grad()
            if there:
                (torch.stack([loss_of(reference, rank, step) for rank in there]).sum() / hvd.size()).backward()
            for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert parameter.grad is not None or hvd.size() == 1
                if parameter.grad is not None and other.grad is not None:
                    torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12)
            with optimizer.skip_synchronize():
                optimizer.step()


def test_two_optimizers_take_turns() -> None:
    """As in adversarial training: each backward reaches one part, and one optimizer steps."""
    parts = [net(1), net(2)]
    optimizers = [wrapped(part) for part in parts]
    for step in range(4):
        for part, optimizer in zip(parts, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(part, hvd.rank(), step).backward()
            optimizer.step()
    assert_same(parts[0], train_locally(net(1), 4))
    assert_same(parts[1], train_locally(net(2), 4))


def test_one_optimizer_steps_after_backwards_through_parts_of_its_model() -> None:
    model = torch.nn.ModuleList([net(1), net(2)])
    optimizer = wrapped(model)
    for step in range(4):
        optimizer.zero_grad()
        for part in model:
            loss_of(part, hvd.rank(), step).backward()
        optimizer.step()
    assert_same(model[0], train_locally(net(1), 4))
    assert_same(model[1], train_locally(net(2), 4))


def test_gradients_are_clipped_between_synchronize_and_step() -> None:
    model, expected = net(), net()
    optimizer, local = wrapped(model), sgd(expected)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        local.zero_grad()
        torch.stack([loss_of(expected, rank, step) for rank in range(hvd.size())]).mean().backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
        local.step()
    assert_same(model, expected)
    loss_of(model, hvd.rank(), 9).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


@pytest.mark.parametrize("passes", [1, 2])
def test_too_many_backwards_before_a_step_are_an_error(passes: int) -> None:
    model = net()
    optimizer = wrapped(model, backward_passes_per_step=passes)
    for step in range(2):  # the first step learns the gradients' layouts
        optimizer.zero_grad()
        for _ in range(passes):
            loss_of(model, hvd.rank(), step).backward()
        if step == 0:
            optimizer.step()
    if hvd.size() > 1:
        with pytest.raises(MisuseError, match="backward_passes_per_step"):
            loss_of(model, hvd.rank(), 3).backward()


# What each rank does in a step: for each backward, the part of the model (0 or 1) whose loss it is. Rank 0, and the others.
PLANS: dict[str, tuple[int, Callable[[bool, int], list[int]]]] = {
    "two-losses": (1, lambda _first, _step: [0, 1]),
    "one-rank-has-fewer": (1, lambda first, step: [0, 1] if first or step % 2 else [0]),
    "ranks-take-turns": (1, lambda first, step: [0] if step % 4 == (1 if first else 3) else [0, 1]),
    "in-different-orders": (1, lambda first, _step: [0, 1] if first else [1, 0]),
    "other-parts": (1, lambda first, _step: [0] if first else [1]),
    "each-loss-twice": (2, lambda _first, _step: [0, 1, 0, 1]),
    "one-loss-after-the-other": (2, lambda first, _step: [0, 0, 1, 1] if first else [1, 1, 0]),
    "a-loss-is-added-later": (1, lambda first, step: [0, 1] if step > 1 and first else [0]),
}


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_ranks_may_run_other_backwards_in_the_same_step(plan: tuple[int, Callable[[bool, int], list[int]]], op: Any) -> None:
    passes, parts_of = plan
    model, expected = (torch.nn.ModuleList([net(1), net(2)]) for _ in range(2))
    optimizer, local = wrapped(model, op=op, backward_passes_per_step=passes), sgd(expected)

    def losses(trained: Any, rank: int, step: int) -> list[torch.Tensor]:
        parts = parts_of(rank == 0, step)
        return [loss_of(trained[part], rank, 100 * step + 10 * part + number) for number, part in enumerate(parts)]

    for step in range(6):
        optimizer.zero_grad()
        for loss in losses(model, hvd.rank(), step):
            loss.backward()
        optimizer.step()
        local.zero_grad()
        total = torch.stack([loss for rank in range(hvd.size()) for loss in losses(expected, rank, step)]).sum()
        (total if op is hvd.Sum else total / hvd.size()).backward()
        for parameter in expected.parameters():  # a parameter that no rank reached gets zeros
            if parameter.grad is None and hvd.size() > 1:
                parameter.grad = torch.zeros_like(parameter)
        local.step()
        assert_same(model, expected)


def test_the_sum_of_a_gradient_that_was_summed_before_is_an_error_on_every_rank() -> None:
    if hvd.size() == 1:
        return
    model = torch.nn.ModuleList([net(1), net(2)])
    optimizer = wrapped(model, op=hvd.Sum)
    for step in range(4):
        optimizer.zero_grad()
        # So far, a step had one backward. So the first backward of the last step is reduced, with both parts.
        for part in [0, 1] if step == 3 and hvd.rank() == 0 else [1, 0] if step == 3 else [step % 2]:
            loss_of(model[part], hvd.rank(), step).backward()
        if step < 3:
            optimizer.step()
    with pytest.raises(MisuseError, match="sum of the losses"):
        optimizer.step()


def test_gradients_are_combined_when_backward_returns() -> None:
    """From the second step on. So communication overlaps with backward, also if backward leaves out parameters."""
    model = torch.nn.ModuleList([net(1), net(2)])
    optimizer = wrapped(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model[0], hvd.rank(), step).backward()
        if step > 0:
            mean = torch.stack(hvd.allgather_object(model[0][0].weight.grad)).mean(0)
            assert torch.equal(mean, model[0][0].weight.grad)
        optimizer.step()


def test_users_hooks_run_once_in_a_step() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    calls: list[str] = []

    def halve(parameter: torch.Tensor) -> None:
        calls.append("after")
        parameter.grad.mul_(0.5)  # type: ignore[union-attr]

    def add_one(gradient: torch.Tensor) -> torch.Tensor:
        calls.append("before")
        return gradient + 1

    weight.register_hook(add_one)  # type: ignore[no-untyped-call]
    weight.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    for step in range(3):
        optimizer.zero_grad()
        if step != 1:  # a step without a backward
            (weight * (hvd.rank() + 1.0)).sum().backward()
        optimizer.synchronize()
        mean = 0.0 if step == 1 else ((hvd.size() + 1) / 2 + 1) / 2
        if hvd.size() > 1 or step != 1:
            torch.testing.assert_close(weight.grad, torch.full((3,), mean))
    assert calls == ["before", "after"] * 2


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=str)
def test_parameters_that_are_unfrozen_are_combined(op: Any) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = wrapped(model, op=op)
    start = model[0].weight.detach().clone()
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        assert torch.equal(model[0].weight, start) == (step < 2)
        copies = hvd.allgather_object([parameter.detach() for parameter in model.parameters()])
        assert all(torch.equal(one, other) for each in copies for one, other in zip(each, copies[0], strict=True))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=str)
def test_an_optimizer_may_have_only_frozen_parameters(op: Any) -> None:
    model = net().requires_grad_(False)
    start = copy.deepcopy(model)
    optimizer = wrapped(model, op=op)
    optimizer.zero_grad()
    optimizer.step()
    for parameter, other in zip(model.parameters(), start.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_gradients_that_the_script_sets_are_combined_in_every_step() -> None:
    model = net()
    extra = torch.nn.Parameter(torch.zeros(2))
    named = [*model.named_parameters(), ("extra", extra)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([each for _, each in named], lr=0.1), named)
    for step in range(4):
        optimizer.zero_grad()
        if step == 2:
            extra.grad = torch.full((2,), hvd.rank() + step + 1.0)
        loss_of(model, hvd.rank(), step).backward()
        extra.grad = torch.full((2,), hvd.rank() + step + 1.0)
        optimizer.synchronize()
        assert extra.grad.tolist() == [(hvd.size() + 1) / 2 + step] * 2


def test_a_step_that_is_left_out_after_synchronize_does_not_change_the_next_step() -> None:
    for passes in (1, 2):
        model, expected = net(), net()
        optimizer, local = wrapped(model, backward_passes_per_step=passes), sgd(expected)
        for step in range(4):
            optimizer.zero_grad()
            for number in range(passes if step != 2 else passes - 1):
                loss_of(model, hvd.rank(), passes * step + number).backward()
            if step == 1:
                optimizer.synchronize()
                continue
            optimizer.step()
            local.zero_grad()
            losses = [
                loss_of(expected, rank, passes * step + number)
                for rank in range(hvd.size())
                for number in range(passes if step != 2 else passes - 1)
            ]
            if losses:
                (torch.stack(losses).sum() / hvd.size()).backward()
            elif hvd.size() > 1:
                for parameter in expected.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            local.step()
            assert_same(model, expected)


@pytest.mark.parametrize("passes", [1, 2])
def test_reentrant_checkpoints(passes: int) -> None:
    def loss(layers: Any, rank: int, step: int) -> torch.Tensor:
        inner = checkpoint(
            layers[2], checkpoint(layers[1], layers[0](batch(rank, step)[0]), use_reentrant=True), use_reentrant=True
        )
        return layers[4](layers[3](inner)).square().mean()

    model, expected = net(), net()
    optimizer, local = wrapped(model, backward_passes_per_step=passes), sgd(expected)
    for step in range(3):
        optimizer.zero_grad()
        local.zero_grad()
        for number in range(passes):
            loss(model, hvd.rank(), passes * step + number).backward()
            for rank in range(hvd.size()):
                (loss(expected, rank, passes * step + number) / hvd.size()).backward()
        optimizer.step()
        local.step()
    assert_same(model, expected)


@pytest.mark.parametrize("first", [0, 2])
def test_a_whole_model_may_be_a_reentrant_checkpoint(first: int) -> None:
    """The backward begins inside the checkpoint. `first` is the first step with the checkpoint."""
    model, expected = net(), net()
    optimizer = wrapped(model)
    for step in range(first + 3):
        optimizer.zero_grad()
        inputs, targets = batch(hvd.rank(), step)
        outputs = checkpoint(model, inputs.requires_grad_(), use_reentrant=True) if step >= first else model(inputs)
        torch.nn.functional.mse_loss(outputs, targets).backward()
        optimizer.step()
    assert_same(model, train_locally(expected, first + 3))


def test_a_reentrant_checkpoint_that_the_reduction_cannot_wait_for_is_an_error() -> None:
    if hvd.size() == 1:
        return
    hvd.shutdown()
    with as_default(None):  # the error ends the backward after its reduction has begun, so this test has its own group
        hvd.init()
        model = net()
        optimizer = wrapped(model)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), 0).backward()
            optimizer.step()
        inner = checkpoint(model[:2], batch(hvd.rank(), 0)[0].requires_grad_(), use_reentrant=True)
        with pytest.raises(MisuseError, match="also use the checkpoint in the first step"):
            model[2:](inner).sum().backward()
        hvd.shutdown()


def test_a_closure_runs_before_its_gradients_are_combined() -> None:
    model = net()
    optimizer = wrapped(model)

    def closure(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        loss.backward()
        return loss

    for step in range(3):
        optimizer.step(lambda step=step: closure(step))
    assert_same(model, train_locally(net(), 3))


def test_gradients_are_combined_after_a_step_with_a_closure_though_a_rank_has_no_backward() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), [("p", parameter)])

    def closure() -> torch.Tensor:
        if hvd.rank() == 0:
            (6.0 * parameter).sum().backward()
        return torch.zeros(())

    average = 0.0
    for step in range(4):
        if step % 2:
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)
        average += 6 / hvd.size()
        assert parameter.grad is not None or hvd.size() == 1
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad.tolist(), [average] * 2)


def test_a_gradient_of_zeros_on_another_rank_does_not_hide_a_gradient_that_the_script_sets() -> None:
    model, extra = net(), torch.nn.Parameter(torch.zeros(2))
    named = [*model.named_parameters(), ("extra", extra)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([each for _, each in named], lr=0.1), named, backward_passes_per_step=2
    )
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        for number in range(2 if hvd.rank() == 0 else 1):
            loss = loss_of(model, hvd.rank(), 2 * step + number)
            (loss + extra.sum() if step < 2 else loss).backward()
        if hvd.rank() == 0 and step >= 2:
            extra.grad = torch.full((2,), 6.0)
        optimizer.synchronize()
        expected = 6 / hvd.size() if step >= 2 else (hvd.size() + 1) / hvd.size()
        assert extra.grad is not None
        torch.testing.assert_close(extra.grad.tolist(), [expected] * 2)


def test_sparse_gradients_that_are_reduced_as_dense_ones_may_be_kept() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True).double()
    other = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    named = [("table", table.weight), ("other", other)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([each for _, each in named], lr=0.0), named, sparse_as_dense=True)
    expected = torch.zeros(4, 2, dtype=torch.float64)
    for step in range(4):
        loss = other.sum()
        if step == 0 or hvd.rank() == 0:  # the other ranks keep the gradient of step 0
            loss = loss + table(torch.tensor([step])).sum()
        loss.backward()
        optimizer.step()
        expected[step] += 1.0 if step == 0 else 1.0 / hvd.size()
        assert table.weight.grad is not None
        torch.testing.assert_close(table.weight.grad.to_dense(), expected)


@pytest.mark.parametrize("seed", range(100 if FULL else 15))
def test_random_programs_train_as_one_process_does(seed: int) -> None:
    play(draw(seed, hvd.size()))


def train_in_two_worlds(model: torch.nn.Module, optimizer: Any, before_the_second: Callable[[], None] = lambda: None) -> None:
    """Train for four steps, with `shutdown` and `init` after two."""
    for step in range(4):
        if step == 2:
            before_the_second()
            hvd.shutdown()
            hvd.init()
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()


def test_an_optimizer_goes_on_after_shutdown_and_init() -> None:
    hvd.shutdown()
    with as_default(None):  # groups of its own, which `shutdown` closes
        hvd.init()
        model = net()
        optimizer = wrapped(model)
        train_in_two_worlds(model, optimizer)
        assert_same(model, train_locally(net(), 4))
        hvd.shutdown()


def test_an_optimizer_that_the_script_drops_is_gone_at_once() -> None:
    gc.disable()
    try:
        model = net()
        for _ in range(2):
            optimizer = wrapped(model)
            for step in range(2):
                optimizer.zero_grad()
                loss_of(model, hvd.rank(), step).backward()
                optimizer.step()
            del optimizer
    finally:
        gc.enable()
    assert_same(model, train_locally(train_locally(net(), 2), 2))


def test_optimizers_are_numbered_alike_where_some_are_gone() -> None:
    kept = wrapped(net(5))
    if hvd.rank() == 0:
        del kept
    model, expected = net(), net()
    optimizer, local = wrapped(model), sgd(expected)
    hvd.shutdown()
    hvd.init()
    there = range(1 if hvd.size() > 1 else 0, hvd.size())
    for step in range(3 if hvd.rank() in there else 0):  # rank 0 joins at once
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())
    for step in range(3):
        local.zero_grad()
        (torch.stack([loss_of(expected, rank, step) for rank in there]).sum() / hvd.size()).backward()
        local.step()
    assert_same(model, expected)


class ToBfloat16:
    """A compressor that does not derive from `hvd.Compressor`."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.bfloat16(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


def test_a_compressor_needs_only_two_methods() -> None:
    compression: Any = ToBfloat16
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum, compression=compression).tolist() == [hvd.size()] * 3
    model = net()
    optimizer = wrapped(model, compression=compression)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    assert_same(model, train_locally(net(), 2), rtol=5e-2, atol=5e-3)


class InPlace(hvd.Compressor):
    """Returns the tensor itself, as Horovod allows."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.mul_(0.5), None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor * 2


class InPlaceBothTimes(InPlace):
    is_elementwise = True

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.mul_(2)


@pytest.mark.parametrize("compression", [InPlace, InPlaceBothTimes])
@pytest.mark.parametrize("predivide", [1.0, 2.0])
def test_a_tensor_that_is_compressed_in_place_is_decompressed(compression: Any, predivide: float) -> None:
    model = net()
    optimizer = wrapped(model, compression=compression, gradient_predivide_factor=predivide)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    assert_same(model, train_locally(net(), 2))


def test_sparse_gradients_may_come_late() -> None:
    def table() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.ModuleDict({"table": torch.nn.Embedding(8, 3, sparse=True), "head": torch.nn.Linear(3, 1)}).double()

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        rows = torch.ones(3, 3).double() if step == 0 else model["table"](torch.tensor([rank, (rank + step) % 8, 7]))
        return model["head"](rows).square().mean()

    model, expected = table(), table()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    local = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, hvd.rank(), step).backward()
        optimizer.synchronize()
        assert step == 0 or model["table"].weight.grad.is_sparse
        with optimizer.skip_synchronize():
            optimizer.step()
        local.zero_grad()
        (torch.stack([loss(expected, rank, step) for rank in range(hvd.size())]).sum() / hvd.size()).backward()
        local.step()
    assert_same(model, expected)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense: bool) -> None:
    def embedding() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.ModuleDict({"table": torch.nn.Embedding(8, 3, sparse=True), "head": torch.nn.Linear(3, 1)}).double()

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        return model["head"](model["table"](torch.tensor([rank, (rank + step) % 8, 7]))).square().sum()

    model, expected = embedding(), embedding()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse_as_dense=as_dense
    )
    local = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        if hvd.rank() != 0 or step != 1 or hvd.size() == 1:  # one rank without a backward
            loss(model, hvd.rank(), step).backward()
        optimizer.synchronize()
        assert hvd.size() == 1 or model["table"].weight.grad.is_sparse
        with optimizer.skip_synchronize():
            optimizer.step()
        local.zero_grad()
        there = range(1 if step == 1 and hvd.size() > 1 else 0, hvd.size())
        (torch.stack([loss(expected, rank, step) for rank in there]).sum() / hvd.size()).backward()
        local.step()
    assert_same(model, expected)


def test_adasum_combines_what_the_steps_changed() -> None:
    model = net()
    optimizer = wrapped(model, op=hvd.Adasum)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.step()
    steps = []
    for rank in range(hvd.size()):
        local = net()
        optimizer = sgd(local)
        loss_of(local, rank, 0).backward()
        optimizer.step()
        steps.append([(p.detach() - s).numpy().ravel() for p, s in zip(local.parameters(), start, strict=True)])
    for index, (parameter, first) in enumerate(zip(model.parameters(), start, strict=True)):
        change = adasum_by_numpy([each[index] for each in steps]).reshape(parameter.shape)
        torch.testing.assert_close(parameter.detach(), first + torch.from_numpy(change), rtol=1e-10, atol=1e-12)


def test_an_optimizer_of_a_process_set() -> None:
    if hvd.size() == 1:
        return
    pairs = hvd.add_process_set([1] if hvd.size() == 2 else [0, hvd.size() - 1])
    model = net()
    optimizer = wrapped(model, process_set=pairs)
    optimizer.zero_grad()
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.synchronize()
    expected = net()
    ranks = pairs.ranks if pairs.included() else [hvd.rank()]
    torch.stack([loss_of(expected, rank, 0) for rank in ranks]).mean().backward()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_only_the_members_of_a_process_set_need_to_make_its_optimizer() -> None:
    """The optimizers of all ranks are still numbered alike, also in the next world after those of the set are gone."""
    if hvd.size() == 1:
        return
    made = []
    for members in ([0], [*range(1, hvd.size())]):
        process_set = hvd.add_process_set(members)
        if process_set.included() and hvd.rank() != 1:
            made.append(wrapped(net(), process_set=process_set))
    model = net()
    optimizer = wrapped(model)
    train_in_two_worlds(model, optimizer, before_the_second=made.clear)
    assert_same(model, train_locally(net(), 4))
    assert hvd.join() == hvd.size() - 1


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("op", [hvd.Max, hvd.Min, hvd.Product])
def test_zeros_of_a_joined_rank_are_no_maximum(op: Any, steps: int) -> None:
    """After the error, and when all ranks have joined, the optimizer goes on."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), op=op)

    def step() -> None:
        optimizer.zero_grad()
        (-(hvd.rank() + 1) * weight.sum()).backward()
        optimizer.step()

    for _ in range(steps):
        step()
    if hvd.size() > 1 and hvd.rank() != 0:
        with pytest.raises(MisuseError, match=rf"op=hvd\.{op.name.title()}\) .*a rank has joined"):
            step()
    assert hvd.join() == hvd.size() - 1
    gradients = [-float(rank + 1) for rank in range(hvd.size())]
    expected = {hvd.Max: max(gradients), hvd.Min: min(gradients), hvd.Product: float(np.prod(gradients))}[op]
    for _ in range(2):
        step()
        assert weight.grad is not None
        assert weight.grad.tolist() == [expected] * 3


def test_ranks_join_when_their_data_ends() -> None:
    """Rank r has r + 1 batches. Ranks that have joined count as zeros; the model of the last rank is the result."""
    model, expected = net(), net()
    optimizer, local = wrapped(model), sgd(expected)
    for step in range(hvd.rank() + 1):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    last = hvd.join()
    assert last == hvd.size() - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    for step in range(hvd.size()):
        local.zero_grad()
        (torch.stack([loss_of(expected, rank, step) for rank in range(step, hvd.size())]).sum() / hvd.size()).backward()
        local.step()
    assert_same(model, expected)


def test_a_rank_without_any_data_joins_at_once() -> None:
    model, expected = net(), net()
    optimizer, local = wrapped(model), sgd(expected)
    for step in range(3 if hvd.rank() or hvd.size() == 1 else 0):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    for step in range(3):
        local.zero_grad()
        there = range(0 if hvd.size() == 1 else 1, hvd.size())
        (torch.stack([loss_of(expected, rank, step) for rank in there]).sum() / hvd.size()).backward()
        local.step()
    assert_same(model, expected)


def test_arguments_that_make_no_sense_are_refused() -> None:
    model = net()
    named = list(model.named_parameters())
    for options in (
        {"named_parameters": named[:-1]},
        {"named_parameters": [("same", parameter) for _, parameter in named]},
        {"named_parameters": [parameter for _, parameter in named]},
        {"backward_passes_per_step": 0},
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        {"groups": 0},
        {"groups": [["no tensor"]]},
        {"groups": [[named[0][1]], [named[0][1]]]},
    ):
        with pytest.raises(ValueError, match=r"expected|splits"):
            hvd.DistributedOptimizer(sgd(model), **options)
    with pytest.raises(ValueError, match="found both"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert hvd.allreduce(torch.ones(1), average=False).item() == hvd.size()
    assert any("op=hvd.Average" in str(each.message) for each in seen)


def test_learning_rates_that_a_scheduler_changes_are_the_optimizers() -> None:
    model = net()
    inner = sgd(model)
    before = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert optimizer.param_groups is inner.param_groups
    assert before.get_last_lr() == [0.1]
    expected = train_locally(net(), 1)
    assert_same(model, expected)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # it knows only the inner optimizer's `step`
@pytest.mark.parametrize("loads", ["broadcast", "outer", "inner"])
def test_a_scheduler_made_before_the_optimizer_was_wrapped_goes_on_after_a_load(loads: str) -> None:
    model = net()
    inner = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    for step in range(2):
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        scheduler.step()
    if loads == "broadcast":
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    else:
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 0.4
        (optimizer if loads == "outer" else inner).load_state_dict(saved)
    scheduler.step()
    expected = 0.1 / 8 if loads == "broadcast" else 0.2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert all("momentum_buffer" in optimizer.state[parameter] for parameter in model.parameters())


# ---- state ----


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.LBFGS], ids=str
)
def test_the_state_of_an_optimizer_is_broadcast(kind: type[torch.optim.Optimizer]) -> None:
    root = hvd.size() - 1
    model = net(seed=hvd.rank())
    optimizer = kind(model.parameters(), lr=0.1 * (hvd.rank() + 1))  # type: ignore[call-arg]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), 0)
        loss.backward()
        return loss

    if hvd.rank() == root:
        optimizer.step(closure)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=root)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert optimizer.param_groups[0]["lr"] == 0.1 * (root + 1)

    def digest(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {str(key): digest(each) for key, each in value.items()}
        return [digest(each) for each in value] if isinstance(value, (list, tuple)) else value

    digests = hvd.allgather_object(digest([optimizer.state_dict(), [p.detach() for p in model.parameters()]]))
    assert all(each == digests[root] for each in digests)


def test_objects() -> None:
    objects = [{"rank": rank, "list": list(range(rank))} for rank in range(hvd.size())]
    assert hvd.allgather_object(objects[hvd.rank()]) == objects
    for root in range(hvd.size()):
        assert hvd.broadcast_object(objects[hvd.rank()], root, name="x") == objects[root]


def test_sync_batch_norm_sees_the_whole_batch() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2 + rank, 3, 4) for rank in range(hvd.size())]
    layer, whole = hvd.SyncBatchNorm(3), torch.nn.BatchNorm1d(3)
    torch.testing.assert_close(
        layer(inputs[hvd.rank()]), whole(torch.cat(inputs)).split([2 + r for r in range(hvd.size())])[hvd.rank()]
    )
    torch.testing.assert_close(layer.running_var, whole.running_var)


# ---- arguments of other kinds ----


class Counted(torch.nn.Linear):
    """A layer whose state_dict has an object that is not a tensor."""

    number = 0

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, state: int) -> None:
        self.number = state


def test_the_state_of_a_training_has_objects_of_the_model() -> None:
    model = Counted(2, 1)
    model.number = 5 + hvd.rank()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # tensors only
    hvd.broadcast_parameters(model.state_dict().items(), root_rank=0)
    assert model.number == 5 + hvd.rank()
    state = hvd.elastic.TorchState(model)
    state.root_rank = hvd.size() - 1
    state.sync()
    assert model.number == 5 + hvd.size() - 1


def test_broadcast_parameters_refuses_what_it_cannot_send() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    for params in (optimizer.state_dict(), {"lr": 0.1}):
        with pytest.raises(InvalidArgumentError, match="broadcast_optimizer_state"):
            hvd.broadcast_parameters(params, root_rank=0)


def test_process_sets_of_other_kinds_of_ranks() -> None:
    for ranks in (np.arange(2), [np.int64(1), 0], map(int, "01"), (each for each in (1, 0))):
        found = hvd.ProcessSet(ranks).ranks
        assert found == [0, 1]
        assert all(type(each) is int for each in found)
    with pytest.raises(InvalidArgumentError, match="list of ranks"):
        hvd.ProcessSet([0.0])


def test_the_number_of_groups_may_be_an_integer_of_numpy() -> None:
    model, expected = net(), net()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), groups=np.int64(2))
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    assert_same(model, train_locally(expected, 2))


@pytest.mark.parametrize("splits", [[], torch.tensor([], dtype=torch.int64)], ids=["list", "tensor"])
def test_alltoall_without_splits_sends_equal_parts(splits: Any) -> None:
    output, received = hvd.alltoall(torch.arange(hvd.size()) + 10 * hvd.rank(), splits=splits)
    assert output.tolist() == [10 * rank + hvd.rank() for rank in range(hvd.size())]
    assert received.tolist() == [1] * hvd.size()


def test_adasum_steps_after_synchronize_without_a_warning() -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum, backward_passes_per_step=3)
    assert optimizer.backward_passes_per_step == 3
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
