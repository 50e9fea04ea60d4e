"""The collectives layer over real ranks: backend "mpi", and "gloo" with ranks that meet over MPI."""

from __future__ import annotations

import os

import pytest
import torch

from syncline.collectives import (
    DisagreementError,
    InvalidArgumentError,
    LaunchError,
    MisuseError,
    NotInitializedError,
    ProcessGroup,
    UnknownBackendError,
    all_reduce,
    backend_names,
    barrier,
    broadcast,
    destroy_process_group,
    exchange_objects,
    get_default_group,
    get_local_rank,
    get_local_size,
    get_node_rank,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
    placement_of,
)
from syncline.collectives.health.statements import ranks_in_words
from syncline.collectives.startup.backend import ConnectRequest
from syncline.collectives.startup.launch import detect_launch
from syncline.collectives.startup.mpi_library import CudaAwareness
from syncline.collectives.startup.registry import load_backend
from syncline.collectives.testing import CHECKS, Check
from syncline.collectives.testing.conformance.endings import ENDINGS
from test_support.endings import ENDINGS_TO_RUN
from test_support.fake_device import FakeDevice, let_the_cpu_play

pytestmark = pytest.mark.mpi


def connect(backend: str, *, name: str = "integration") -> ProcessGroup:
    request = ConnectRequest(detect_launch(os.environ), None, None, None, timeout_s=30.0, group_name=name)
    return load_backend(backend).connect(request)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_mpi_conforms(mpi_group: ProcessGroup, check: Check) -> None:
    check(mpi_group)


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
@pytest.mark.parametrize("name", ENDINGS_TO_RUN)
def test_groups_end_in_order(backend: str, name: str) -> None:
    ENDINGS[name](connect(backend))


def test_groups_do_not_disturb_one_another(mpi_group: ProcessGroup) -> None:
    """Two groups over the same ranks, in turn and in flight together."""
    other = connect("mpi", name="other")
    tensors = [torch.full((1000,), float(mpi_group.rank + n)) for n in range(8)]
    works = [(mpi_group, other)[n % 2].all_reduce(tensor, async_op=True) for n, tensor in enumerate(tensors)]
    for work in reversed(works):
        work.wait()
    size = mpi_group.size
    assert [tensor.unique().tolist() for tensor in tensors] == [[size * (size - 1) / 2 + n * size] for n in range(8)]
    other.close()


def test_every_rank_is_another_process(mpi_group: ProcessGroup) -> None:
    places = exchange_objects((mpi_group.rank, os.getpid()), group=mpi_group)
    assert [rank for rank, _ in places] == list(range(mpi_group.size))
    assert len({pid for _, pid in places}) == mpi_group.size


def test_default_group(world: ProcessGroup) -> None:
    assert get_default_group() is world
    assert world.backend_name == "mpi"
    assert world.describe().startswith(("mpi: MPICH", "mpi: Open MPI", "mpi: Intel MPI"))
    assert (get_rank(), get_world_size()) == (world.rank, world.size)
    tensor = torch.tensor([float(get_rank() + 1)])
    assert all_reduce(tensor) is None
    assert tensor.item() == world.size * (world.size + 1) / 2
    work = broadcast(tensor.fill_(get_rank()), world.size - 1, async_op=True)
    assert work is not None
    work.wait()
    assert tensor.item() == world.size - 1
    assert barrier() is None


@pytest.mark.parametrize("backend", [None, "mpi", "gloo"])
def test_init_and_destroy_again_and_again(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCLINE_BACKEND", raising=False)
    for _ in range(3):
        group = init_process_group(backend)
        assert group.backend_name == (backend or "mpi")
        tensor = torch.ones(5)
        group.all_reduce(tensor)
        assert tensor.tolist() == [group.size] * 5
        destroy_process_group()
        assert not is_initialized()
        with pytest.raises(NotInitializedError, match="init_process_group"):
            all_reduce(tensor)


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_one_rank_alone_may_ask_where_it_is(backend: str) -> None:
    """The ranks have told each other their hosts when they connected; a call of one rank would wait for the others."""
    group = init_process_group(backend, timeout=30)
    part = group.split(0, -group.rank)
    assert part is not None
    if group.rank == 0:
        assert (get_local_rank(), get_local_size(), get_node_rank()) == (0, group.size, 0)
        assert get_local_rank(part) == group.size - 1
        assert placement_of(part).nodes == 1
    part.close()
    destroy_process_group()


def test_backend_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_BACKEND", "gloo")
    assert init_process_group().backend_name == "gloo"
    destroy_process_group()


def test_second_init_is_refused(world: ProcessGroup) -> None:
    with pytest.raises(MisuseError, match="destroy_process_group first"):
        init_process_group("mpi")
    assert get_default_group() is world


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_contradicting_the_launcher(backend: str) -> None:
    launch = detect_launch(os.environ)
    assert launch is not None
    with pytest.raises(LaunchError, match=f"world_size={launch.world_size + 1} was asked for"):
        init_process_group(backend, world_size=launch.world_size + 1)
    with pytest.raises(LaunchError, match=f"rank={launch.rank + 1} was asked for"):
        init_process_group(backend, world_size=launch.world_size, rank=launch.rank + 1)
    assert not is_initialized()
    group = init_process_group(backend, world_size=launch.world_size, rank=launch.rank)
    group.barrier()
    destroy_process_group()


def test_unknown_backend_lists_the_known() -> None:
    with pytest.raises(UnknownBackendError, match=f"'smoke'.*{', '.join(backend_names())}"):
        init_process_group("smoke")


def test_wrong_device_is_named(mpi_group: ProcessGroup) -> None:
    with pytest.raises(InvalidArgumentError, match="moves tensors on cpu, found a tensor on meta"):
        mpi_group.all_reduce(torch.empty(3, device="meta"))


@pytest.mark.parametrize("is_aware", [False, True])
def test_tensors_of_a_device(monkeypatch: pytest.MonkeyPatch, is_aware: bool) -> None:
    """Tensors are staged or handed to MPI directly, depending on the check for MPI's awareness. The CPU plays the device."""
    from syncline.collectives.transports.mpi import connection

    let_the_cpu_play(monkeypatch)
    device = FakeDevice().plays_here()
    monkeypatch.setattr(connection, "cuda_runtime", lambda: device)
    monkeypatch.setattr(connection, "_cuda_awareness", lambda: CudaAwareness(is_aware, ""))
    group = connect("mpi")
    device.log.clear()  # the host's messages with which the ranks agreed on their options
    tensor = torch.arange(20_000.0) * (group.rank + 1)
    group.all_reduce(tensor, async_op=True).wait()
    assert torch.equal(tensor, torch.arange(20_000.0) * (group.size * (group.size + 1) // 2))
    part = group.split(0)
    assert part is not None
    part.broadcast(tensor.fill_(group.rank), group.size - 1)
    assert tensor.unique().tolist() == [group.size - 1]
    assert ("in" in device.log) is not is_aware
    assert device.log.count("now") == device.log.count("record") == 2
    assert group.describe().endswith("cuda directly" if is_aware else "cuda staged through the host")
    part.close()
    group.close()


def test_a_group_for_the_host_alone_asks_nothing_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside NCCL, where the check for CUDA memory would start a process on each rank for nothing."""
    from syncline.collectives.transports.mpi import connection

    monkeypatch.setattr(connection, "cuda_runtime", pytest.fail)
    request = ConnectRequest(detect_launch(os.environ), None, None, None, timeout_s=30.0, devices=frozenset({"cpu"}))
    group = load_backend("mpi").connect(request)
    assert group.device_types == {"cpu"}
    group.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors(mpi_group: ProcessGroup) -> None:
    """As many ranks as there are; they may share one device."""
    tensor = torch.full((100_000,), mpi_group.rank + 1.0, device="cuda", dtype=torch.bfloat16)
    mpi_group.all_reduce(tensor, async_op=True).wait()
    assert tensor.eq(mpi_group.size * (mpi_group.size + 1) // 2).all()
    gathered = torch.empty(mpi_group.size * 3, device="cuda")
    mpi_group.all_gather_into_tensor(gathered, torch.full((3,), float(mpi_group.rank), device="cuda"))
    assert gathered.view(-1, 3)[:, 0].tolist() == list(range(mpi_group.size))


def test_errors_name_the_call_that_the_program_has_written(mpi_group: ProcessGroup) -> None:
    """reduce_scatter of different sizes is a reduce for each rank."""
    request = ConnectRequest(detect_launch(os.environ), None, None, None, timeout_s=30.0, check_calls=True)
    group = load_backend("mpi").connect(request)
    if group.size > 1:
        inputs = [torch.ones(2 + rank) for rank in range(group.size)]
        with pytest.raises(DisagreementError, match=r"reduce\(float32\[2\], op=SUM, root=0, in reduce_scatter\)"):
            group.reduce_scatter(torch.empty(2), inputs) if group.rank == 0 else group.barrier()
    mpi_group.barrier()
    group.abort()


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_small_calls_are_compared_where_asked_for(mpi_group: ProcessGroup, backend: str) -> None:
    request = ConnectRequest(detect_launch(os.environ), None, None, None, timeout_s=30.0, check_calls=True)
    group = load_backend(backend).connect(request)
    if group.size > 1:
        others = ranks_in_words(range(1, group.size))
        with pytest.raises(
            DisagreementError, match=rf"\n  rank 0: all_reduce\(float32\[2\], op=SUM\)\n  {others}: barrier\(\)"
        ):
            group.all_reduce(torch.ones(2)) if group.rank == 0 else group.barrier()
    mpi_group.barrier()
    group.abort()


def test_gloo_meets_over_mpi_whatever_a_script_has_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many scripts set MASTER_ADDR for torch. Under mpirun it must not ask for a secret, which MPI distributes itself."""
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setenv("MASTER_PORT", "29500")
    group = connect("gloo", name="exported")
    assert sum(exchange_objects(1, group=group)) == group.size
    group.close()
