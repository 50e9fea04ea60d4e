"""Functions of torch.distributed other than collectives, over backend "syncline-mpi"."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx

from syncline.collectives import CollectiveTimeout, InvalidArgumentError, MisuseError, as_process_group
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.startup.registry import load_backend
from syncline.collectives.torch_backend import TorchProcessGroup, monitored_barrier

# An argument that torch has had since 2.11.
IS_OLD = "sort_ranks" not in inspect.signature(dist.new_group).parameters
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:.* (is|will be) deprecated:FutureWarning"),  # torch 2.13 has new names for some
]

Tensors: TypeAlias = tuple[torch.Tensor, ...]


@pytest.fixture(scope="module", autouse=True)
def listening(mpi_is_up: None) -> Iterator[tuple[set[str], set[str]]]:
    """The whole set-up; and this process's listening sockets before and after it."""
    before = listening_sockets()
    dist.init_process_group("syncline-mpi", init_method="mpi://", timeout=timedelta(seconds=30))
    yield before, listening_sockets()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mpi_is_up() -> None:
    """Start MPI first, because the library may open ports of its own."""
    assert load_backend("mpi").missing() is None


def listening_sockets() -> set[str]:
    """Addresses from /proc; state 0A means listening."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mine = {os.readlink(path) for path in links if path.is_symlink()}
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {entry[1] for entry in lines if entry[3] == "0A" and f"socket:[{entry[9]}]" in mine}


def world() -> TorchProcessGroup:
    group = dist.distributed_c10d._get_default_group()
    assert isinstance(group, TorchProcessGroup)
    return group


def mine(numel: int = 4) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) + 10 * dist.get_rank()


def all_of(numel: int = 4) -> list[torch.Tensor]:
    return [torch.arange(numel, dtype=torch.float32) + 10 * rank for rank in range(dist.get_world_size())]


def summed(numel: int = 4) -> torch.Tensor:
    return torch.stack(all_of(numel)).sum(0)


def test_what_the_group_says() -> None:
    there = "cpu:syncline-mpi,cuda:syncline-mpi" if torch.cuda.device_count() else "cpu:syncline-mpi"
    assert (dist.get_backend(), world().name(), dist.get_backend_config()) == ("syncline-mpi", "syncline-mpi", there)
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(dist.get_world_size()))
    assert world().group_desc == "default_pg"
    assert world()._device_types == [torch.device("cpu")]


def test_ours_is_underneath() -> None:
    """Nothing is between our functions and our group."""
    ours = as_process_group(world())
    assert isinstance(ours, HostGroup)
    tensor = mine()
    ours.all_reduce(tensor)
    assert torch.equal(tensor, summed())


def test_after_a_wait_the_future_is_done() -> None:
    for _ in range(100):
        tensor = mine()
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        work.wait()
        assert future.value()[0] is tensor


def test_works_and_futures() -> None:
    tensor = mine()
    work = dist.all_reduce(tensor, async_op=True)
    halved = work.get_future().then(lambda done: done.value()[0] / 2)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert torch.equal(tensor, summed())
    assert work.result()[0] is tensor
    assert torch.equal(halved.wait(), summed() / 2)
    with pytest.raises(InvalidArgumentError, match="a receive"):
        work.source_rank()


def test_point_to_point() -> None:
    """Tags, any source, and the sender's rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(torch.tensor([float(rank)]), 0, tag=4)
        dist.send(torch.tensor([-float(rank)]), 0, tag=5)
        return
    for peer in range(1, size):
        tensor = torch.zeros(1)
        assert dist.recv(tensor, peer, tag=5) == peer
        assert tensor.item() == -peer
    found = []
    for _ in range(1, size):
        tensor = torch.zeros(1)
        found.append(dist.recv(tensor, tag=4))
        assert tensor.item() == found[-1]
    assert sorted(found) == list(range(1, size))


def test_batch_isend_irecv() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        pytest.skip("nobody to talk to")
    tensor = torch.zeros(4)
    operations = [
        dist.P2POp(dist.isend, mine(), (rank + 1) % size),
        dist.P2POp(dist.irecv, tensor, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(tensor, all_of()[(rank - 1) % size])


def test_coalesced() -> None:
    """The fast path collects calls of one kind; the other one, by device, takes all kinds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [mine(), mine(3).double(), mine(7)]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert [tensor.tolist() for tensor in tensors] == [summed(n).tolist() for n in (4, 3, 7)]

    gathered = [torch.zeros(size * 4), torch.zeros(size * 3)]
    with _coalescing_manager(async_ops=True) as pending:
        for into, n in zip(gathered, (4, 3), strict=True):
            all_gather_single(into, mine(n))
    pending.wait()
    assert [into.tolist() for into in gathered] == [torch.cat(all_of(n)).tolist() for n in (4, 3)]

    scattered = [torch.zeros(2), torch.zeros(1)]
    with _coalescing_manager():
        for into in scattered:
            reduce_scatter_single(into, mine(size * into.numel()))
    for into in scattered:
        assert torch.equal(into, summed(size * into.numel())[rank * into.numel() :][: into.numel()])

    copied, first = mine(), torch.zeros(4)
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as pending:
        dist.broadcast(copied, size - 1)
        dist.scatter(first, all_of() if rank == 0 else None, 0)
    pending.wait()
    assert torch.equal(copied, all_of()[-1])
    assert torch.equal(first, mine())


def test_coalesced_calls() -> None:
    tensors = [mine(), mine(3)]
    dist.all_reduce_coalesced(tensors)
    assert [tensor.tolist() for tensor in tensors] == [summed().tolist(), summed(3).tolist()]
    outputs = [[torch.zeros(4), torch.zeros(3)] for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(outputs, [mine(), mine(3)])
    assert [row[1].tolist() for row in outputs] == [tensor.tolist() for tensor in all_of(3)]


def test_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": peer} for peer in range(size)]
    told = ["hello", rank] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(told, size - 1)
    assert told == ["hello", size - 1]
    dealt: list[object] = [None]
    dist.scatter_object_list(dealt, [f"for {peer}" for peer in range(size)] if rank == 0 else None, 0)
    assert dealt == [f"for {rank}"]


def test_sub_groups() -> None:
    """Each rank makes only its own groups; our groups underneath have the same ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    odd = dist.new_group(list(range(1, size, 2)), timeout=timedelta(seconds=20)) if size > 1 else None
    if rank % 2:
        tensor = mine()
        dist.all_reduce(tensor, group=odd)
        assert torch.equal(tensor, torch.stack(all_of()[1::2]).sum(0))
        assert as_process_group(odd).ranks == tuple(range(1, size, 2))
        assert as_process_group(odd).timeout_s == 20.0
        dist.destroy_process_group(odd)
    own, everyone = dist.new_subgroups(1)
    assert dist.get_process_group_ranks(own) == [rank]
    assert len(everyone) == size
    if IS_OLD:
        return  # it sorts the ranks of a group
    backwards = dist.new_group(list(reversed(range(size))), sort_ranks=False)
    assert dist.get_group_rank(backwards, rank) == size - 1 - rank
    gathered = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(gathered, mine(), group=backwards)
    assert [tensor.tolist() for tensor in gathered] == [tensor.tolist() for tensor in reversed(all_of())]


def test_a_group_of_gloos() -> None:
    """torch's Gloo finds the ranks in a store over MPI."""
    theirs = dist.new_group(backend="gloo")
    tensor = mine()
    dist.all_reduce(tensor, group=theirs)
    assert torch.equal(tensor, summed())


@pytest.mark.skipif(IS_OLD, reason="this torch splits groups of NCCL only")
def test_split_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with an accelerator, which torch's function requires."""
    rank, size = dist.get_rank(), dist.get_world_size()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    world().bound_device_id = torch.device("cpu", 0)
    try:
        part = dist.split_group(split_ranks=[list(range(size // 2 + 1)), list(range(size // 2 + 1, size)) or [0]])
    finally:
        world().bound_device_id = None
    assert isinstance(part, TorchProcessGroup)
    members = range(size // 2 + 1) if rank <= size // 2 else range(size // 2 + 1, size)
    assert dist.get_process_group_ranks(part) == list(members)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=part)
    assert tensor.item() == sum(members)


def test_functional_collectives() -> None:
    size = dist.get_world_size()
    if size != 2:
        pytest.skip("on two ranks: they load torch.compile, which takes seconds")
    total = functional.all_reduce(mine(), "sum", dist.group.WORLD)
    assert torch.equal(total + 0, summed())
    rows = functional.all_gather_tensor(mine(), 0, dist.group.WORLD)
    assert torch.equal(rows + 0, torch.cat(all_of()))
    part = functional.reduce_scatter_tensor(mine(2 * size), "avg", 0, dist.group.WORLD)
    start = 2 * dist.get_rank()
    assert torch.equal(part + 0, summed(2 * size)[start : start + 2] / size)
    several = functional.all_reduce_coalesced([mine(), mine(2)], "max", dist.group.WORLD)
    assert [(tensor + 0).tolist() for tensor in several] == [all_of()[-1].tolist(), all_of(2)[-1].tolist()]
    exchanged = functional.all_to_all_single(mine(size), None, None, dist.group.WORLD)
    assert torch.equal(exchanged + 0, torch.stack(all_of(size))[:, dist.get_rank()])
    assert torch.equal(functional.broadcast(mine(), 0, dist.group.WORLD) + 0, all_of()[0])


def test_collectives_with_gradients() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = mine().requires_grad_()
    (differentiable.all_reduce(tensor.clone()) * (rank + 1)).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [size * (size + 1) / 2] * 4
    tensor.grad = None
    rows = differentiable.all_gather(tensor)
    (torch.stack(rows) * (rank + 1)).sum().backward()
    assert tensor.grad.tolist() == [size * (size + 1) / 2] * 4


def test_device_mesh() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("rows", "columns"))
    tensor = mine()
    dist.all_reduce(tensor, group=mesh.get_group("rows"))
    assert torch.equal(tensor, summed())
    assert dist.get_process_group_ranks(mesh.get_group("columns")) == [rank]


def test_monitored_barriers() -> None:
    monitored_barrier()
    monitored_barrier(dist.new_group(), timedelta(seconds=20), wait_all_ranks=True)
    world().monitored_barrier(timedelta(seconds=20))
    world().monitored_barrier(timedelta(milliseconds=-1))  # torch's default: the group's own limit
    group = dist.new_group()
    if dist.get_rank() == 0 < dist.get_world_size() - 1:
        with pytest.raises(CollectiveTimeout, match="Rank 0 timed out in monitoredBarrier"):
            group.monitored_barrier(timedelta(0))
    with pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier()


def test_time_limits() -> None:
    """The limit of one call, of one wait, and of the group from now on."""
    if "timeout" in inspect.signature(dist.barrier).parameters:
        dist.barrier(timeout=timedelta(seconds=20))
    work = dist.irecv(torch.zeros(1), 1, tag=77) if dist.get_rank() == 0 < dist.get_world_size() - 1 else None
    if work is not None:
        with pytest.raises(CollectiveTimeout, match=r"not over within 0\.01 s"):
            work.wait(timedelta(milliseconds=10))
    dist.barrier()
    if dist.get_rank() == 1:
        dist.send(torch.zeros(1), 0, tag=77)
    if work is not None:
        work.wait()
    world().set_timeout(timedelta(seconds=29))
    assert as_process_group(world()).timeout_s == 29.0


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.10 warns so in every profile
def test_profiler_ranges() -> None:
    """Named by torch's names. The range of an asynchronous call lasts until the call has finished."""
    tensor = mine()
    with torch.profiler.profile() as profile:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0, async_op=True).wait()
        dist.barrier()
        all_gather_single(torch.zeros(4 * dist.get_world_size()), tensor)
        dist.all_reduce(tensor)  # an older torch lets a call end a little after it was waited for
    names = {event.name for event in profile.events()}
    assert {f"syncline-mpi:{name}" for name in ("all_reduce", "broadcast", "_all_gather_base", "barrier")} <= names


def test_refusals_say_what_and_where() -> None:
    with pytest.raises(InvalidArgumentError, match="moves tensors on cpu, found a tensor on meta"):
        dist.all_reduce(torch.ones(2, device="meta"))
    with pytest.raises(InvalidArgumentError, match=rf"rank {dist.get_rank()} of {dist.get_world_size()}"):
        dist.all_gather([torch.zeros(3)] * (dist.get_world_size() + 1), torch.zeros(3))


# ---- tensors that are no memory, and tools of torch's that watch ----


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as an eager functional collective returns it; tensor parallelism uses such tensors."""
    return functional.AsyncCollectiveTensor(tensor)


def test_results_of_functional_collectives_are_waited_for() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = awaited(mine())
    dist.all_reduce(total)
    assert torch.equal(total + 0, summed())
    rows = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(rows, awaited(mine()))
    assert torch.equal(torch.stack(rows), torch.stack(all_of()))
    dist.all_to_all(rows, [awaited(mine() + peer) for peer in range(size)])
    assert torch.equal(torch.stack(rows), torch.stack(all_of()) + rank)
    part = torch.zeros(4)
    dist.scatter(part, [awaited(mine() + peer) for peer in range(size)] if rank == 0 else None, 0)
    assert torch.equal(part, all_of()[0] + rank)
    several = [mine(), awaited(mine(3))]
    dist.all_reduce_coalesced(several)
    assert [(tensor + 0).tolist() for tensor in several] == [summed().tolist(), summed(3).tolist()]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, awaited(mine()))
    assert [(entry + 0).tolist() for entry in gathered] == [tensor.tolist() for tensor in all_of()]
    if size > 1:
        sending = dist.isend(awaited(mine()), (rank + 1) % size)
        dist.recv(part, (rank - 1) % size)
        sending.wait()
        assert torch.equal(part, all_of()[(rank - 1) % size])


def test_other_tensors_without_memory_are_refused_by_name() -> None:
    class Wrapping(torch.Tensor):
        """Stands for another tensor."""

        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> torch.Tensor:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            pytest.fail(f"{function} was called")

    with pytest.raises(InvalidArgumentError, match="expected a plain tensor, found Wrapping, whose values lie elsewhere"):
        dist.all_reduce(Wrapping(mine()))
    with pytest.raises(InvalidArgumentError, match=r"inside a transformation of torch\.func"):
        torch.vmap(lambda row: dist.all_reduce(row) or row)(torch.ones(2, 3))
    tensor = mine()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, summed())


def test_a_call_on_fake_tensors_communicates_nothing() -> None:
    if dist.get_rank() == 0:  # the others need not call it
        with FakeTensorMode():
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 0, async_op=True).wait()
            dist.all_gather([torch.ones(3) for _ in range(dist.get_world_size())], tensor)
            assert tensor.shape == (3,)
    tensor = mine()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, summed())


def waited(call: Callable[..., Any], *args: Any, async_op: bool, **kwargs: Any) -> None:
    work = call(*args, async_op=async_op, **kwargs)
    if async_op:
        work.wait()


def reduced(async_op: bool) -> Tensors:
    tensor = mine().requires_grad_()
    waited(dist.all_reduce, tensor, dist.ReduceOp.MAX, async_op=async_op)
    return (tensor,)


def reduced_together(async_op: bool) -> Tensors:
    tensors = mine(), mine(3)
    waited(dist.all_reduce_coalesced, list(tensors), async_op=async_op)
    return tensors


def told(async_op: bool) -> Tensors:
    tensor = mine().reshape(2, 2)
    waited(dist.broadcast, tensor, dist.get_world_size() - 1, async_op=async_op)
    return (tensor,)


def gathered(async_op: bool) -> Tensors:
    output = torch.zeros(dist.get_world_size(), 2, 2)
    waited(dist.all_gather_into_tensor, output, mine().reshape(2, 2).t(), async_op=async_op)
    return (output,)


def scattered(async_op: bool) -> Tensors:
    output = torch.zeros(2)
    waited(dist.reduce_scatter_tensor, output, mine(2 * dist.get_world_size()), dist.ReduceOp.AVG, async_op=async_op)
    return (output,)


def exchanged(async_op: bool) -> Tensors:
    output = torch.zeros(2 * dist.get_world_size())
    waited(dist.all_to_all_single, output, mine(2 * dist.get_world_size()), async_op=async_op)
    return (output,)


SEEN = [reduced, reduced_together, told, gathered, scattered, exchanged]


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("call", SEEN)
def test_a_tool_sees_a_collective_and_changes_nothing(call: Callable[[bool], Tensors], async_op: bool) -> None:
    """On one rank, while the others call it as usual."""
    plain = call(async_op)
    if dist.get_rank() != 0:
        watched = call(async_op)
    else:
        with CommDebugMode() as seen:
            watched = call(async_op)
        assert seen.get_total_counts() == 1
    assert all(map(torch.equal, plain, watched))
    # The calls did something. A group of one leaves most of these tensors as they are, and so does the last rank's broadcast.
    if dist.get_rank() == 0 < dist.get_world_size() - 1:
        assert any(not torch.equal(tensor, mine(tensor.numel()).view(tensor.shape)) for tensor in plain)


def test_the_future_of_a_collective_that_a_tool_has_seen() -> None:
    tensor = mine()
    with CommDebugMode():
        halved = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] / 2)
        assert torch.equal(halved.wait(), summed() / 2)
    assert torch.equal(tensor, summed())


def test_a_collective_that_a_tool_has_seen_is_checked() -> None:
    with CommDebugMode(), pytest.raises(InvalidArgumentError, match="expected the output to hold"):
        dist.all_gather_into_tensor(torch.zeros(1), mine())
    with CommDebugMode(), pytest.raises(InvalidArgumentError, match="splits"):
        dist.all_to_all_single(torch.zeros(4), mine(), [3] * dist.get_world_size())


def test_a_traced_program_communicates() -> None:
    """Recorded with other values on each rank, and with coalesced calls as the functions have them."""
    size = dist.get_world_size()

    def program(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor * 2
        dist.all_reduce(tensor)
        rows = torch.zeros(size * 4)
        work = dist.all_gather_into_tensor(rows, tensor + dist.get_rank(), async_op=True)
        work.wait()
        return rows

    traced = make_fx(program)(torch.ones(4))
    assert torch.equal(traced(mine()), torch.cat([2 * summed() + rank for rank in range(size)]))
    assert torch.equal(traced(mine() + 1), torch.cat([2 * (summed() + size) + rank for rank in range(size)]))


def test_a_tracer_refuses_what_its_program_would_leave_out() -> None:
    def program(tensor: torch.Tensor) -> torch.Tensor:
        dist.reduce(tensor, 0)
        return tensor

    for trace in (make_fx(program), lambda tensor: torch.jit.trace(program, (tensor,))):
        with pytest.raises(MisuseError, match=r"reduce on rank .* cannot be recorded by a tracer"):
            trace(torch.ones(4))


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="this torch calls no kernel of ours for them")
def test_operators_on_a_group_of_torch_release_the_gil() -> None:
    """See Note [Kernels of torch and the GIL]: if they keep it, the ranks hang after some hundred calls."""
    size, theirs = dist.get_world_size(), dist.new_group(backend="gloo")
    operators = torch.ops._c10d_functional
    for _ in range(1500):
        rows, part = torch.zeros(size * 4), torch.zeros(4)
        gathered = operators.all_gather_into_tensor_out(torch.ones(4), size, theirs.group_name, out=rows)
        reduced = operators.reduce_scatter_tensor_out(torch.ones(size * 4), "sum", size, theirs.group_name, out=part)
        operators.wait_tensor(gathered)
        operators.wait_tensor(reduced)
        del gathered, reduced  # the queue's thread drops what is left of the tensors
    assert rows.tolist() == [1.0] * (size * 4)
    assert part.tolist() == [float(size)] * 4


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="this torch calls no kernel of ours for them")
def test_operators_that_compiled_programs_call() -> None:
    """torch.compile makes such operators from FSDP's gathers; also for a group that is not ours."""
    rank, size = dist.get_rank(), dist.get_world_size()
    operators, theirs = torch.ops._c10d_functional, dist.new_group(backend="gloo")
    for name in (world().group_name, theirs.group_name):
        rows, part = torch.zeros(size * 4), torch.zeros(4)
        operators.wait_tensor(operators.all_gather_into_tensor_out(mine(), size, name, out=rows))
        assert torch.equal(rows, torch.cat(all_of()))
        word = "min"
        operators.wait_tensor(operators.reduce_scatter_tensor_out(mine(4 * size), word, size, name, out=part))
        assert torch.equal(part, all_of(4 * size)[0][4 * rank :][:4])
    # Code compiled on another rank takes that rank's part of the output as the input.
    rows[4 * ((rank + 1) % size) :][:4] = mine()
    other = rows[4 * ((rank + 1) % size) :][:4]
    operators.wait_tensor(operators.all_gather_into_tensor_out(other, size, world().group_name, out=rows))
    assert torch.equal(rows, torch.cat(all_of()))
    if size > 1 and hasattr(operators, "batch_p2p_ops"):
        received = torch.zeros(4)
        peers = [(rank + 1) % size, (rank - 1) % size]
        sent, arrived = operators.batch_p2p_ops(["isend", "irecv"], peers, [3, 3], [mine(), received], world().group_name)
        operators.wait_tensor(arrived)
        operators.wait_tensor(sent)
        assert torch.equal(received, all_of()[(rank - 1) % size])


def test_no_port_is_opened(listening: tuple[set[str], set[str]]) -> None:
    """Neither the rendezvous nor the group listens, but the ranks share a store."""
    before, after = listening
    assert after <= before
    store = dist.distributed_c10d._get_default_store()
    store.set(f"from {dist.get_rank()}", "here")
    assert store.get(f"from {dist.get_world_size() - 1}") == b"here"


def test_split_sizes_may_be_arrays_of_numpy() -> None:
    size = dist.get_world_size(world())
    sizes, output = np.ones(size, dtype=np.int64), torch.zeros(size)
    dist.all_to_all_single(output, torch.arange(float(size)) + 10 * world().rank(), sizes, sizes, group=world())
    assert output.tolist() == [10.0 * rank + world().rank() for rank in range(size)]
