"""One rank on a GPU: RANK SIZE FOLDER. Runs every part named in FOLDER/parts, one a line, in that order."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from syncline.collectives import (
    CollectiveTimeout,
    DisagreementError,
    InvalidArgumentError,
    ProcessGroup,
    TransportError,
    destroy_process_group,
)
from syncline.collectives.testing import CHECKS
from syncline.collectives.transports.nccl import connections
from syncline.collectives.transports.nccl.group import NcclGroup
from test_support.gpu_ranks import choose_gpu, connect

# NCCL has neither tags nor a receive from any rank.
NOT_OVER_NCCL = (
    "point_to_point_tags",
    "point_to_point_any_source",
    "point_to_point_futures",
    "point_to_point_apart_from_other_calls",
)
LONG_CYCLES = 400_000_000
ACCIDENT = "two_ranks_on_one_gpu_by_accident"
LOSS = "the_others_go_on"


def conformance(group: ProcessGroup, device: torch.device) -> None:
    for name, check in CHECKS.items():
        if name not in NOT_OVER_NCCL:
            with torch.device(device):
                try:
                    check(group)
                except Exception as error:
                    raise AssertionError(f"conformance check '{name}' failed on {group.place()}: {error}") from error


def waiting_orders_streams(group: ProcessGroup, device: torch.device) -> None:
    """The call and `wait` return while the GPU is busy; what follows on the stream still comes after the collective."""
    tensor = torch.zeros(1 << 20, device=device)
    for _ in range(2):  # the first use of a kernel, and of NCCL, waits for the GPU
        tensor += group.rank + 1
        group.all_reduce(tensor, async_op=True).wait()
        assert (tensor * 2).isfinite().all()
        torch.cuda._sleep(1)
    tensor.zero_()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    torch.cuda._sleep(LONG_CYCLES)
    tensor += group.rank + 1
    work = group.all_reduce(tensor, async_op=True)
    work.wait()
    doubled = tensor * 2
    issued_s = time.perf_counter() - start_s
    assert not work.is_completed(), f"the CPU was blocked for {issued_s:.3f} s"
    torch.cuda.synchronize()
    assert work.is_completed()
    assert torch.equal(doubled, torch.full_like(doubled, group.size * (group.size + 1)))


def a_wait_with_a_timeout_blocks(group: ProcessGroup, device: torch.device) -> None:
    tensor = torch.ones(5, device=device)
    torch.cuda._sleep(LONG_CYCLES // 10)
    work = group.all_reduce(tensor, async_op=True)
    work.wait(30)
    assert work.is_completed()


def callbacks_run_after_the_collective(group: ProcessGroup, device: torch.device) -> None:
    """Also when attached late, and when they issue and wait for collectives."""
    torch.cuda._sleep(LONG_CYCLES // 10)
    tensor = torch.full((1 << 20,), float(group.rank + 1), device=device)

    def again(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        squared = done.value()[0].square()
        group.all_reduce(squared, async_op=True).wait()
        return squared

    future = group.all_reduce(tensor, async_op=True).get_future().then(again)
    total = group.size * (group.size + 1) / 2
    assert torch.equal(future.wait(), torch.full_like(tensor, total**2 * group.size))


def memory_in_flight_is_not_reused(group: ProcessGroup, device: torch.device) -> None:
    """The caller drops its tensor at once and overwrites what the allocator gives it next."""
    rows = []
    for number in range(20):
        torch.cuda._sleep(LONG_CYCLES // 100)
        source = torch.full((1 << 18,), float(group.rank + number), device=device)
        block = torch.empty(group.size << 18, device=device)
        work = group.all_gather_into_tensor(block, source, async_op=True)
        del source
        torch.full((1 << 18,), -1.0, device=device)
        rows.append((work, block))
    for number, (work, block) in enumerate(rows):
        work.wait()
        expected = torch.arange(group.size, device=device) + float(number)
        assert torch.equal(block.view(group.size, -1).amin(1), expected)
        assert torch.equal(block.view(group.size, -1).amax(1), expected)


def memory_does_not_pile_up(group: ProcessGroup, device: torch.device) -> None:
    def issue(steps: int) -> None:
        for _ in range(steps):
            group.all_reduce(torch.ones(1 << 20, device=device), async_op=True).wait()
        torch.cuda.synchronize()

    issue(3)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    issue(50)
    assert torch.cuda.max_memory_allocated() - before <= 8 << 22


def a_cuda_graph(group: ProcessGroup, device: torch.device) -> None:
    """Captured once, replayed with other values; collectives of other kinds together."""
    tensor, block = torch.zeros(1000, device=device), torch.zeros(1000 * group.size, device=device)
    group.all_reduce(tensor)
    group.all_gather_into_tensor(block, tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled = tensor * 2
        group.all_reduce(scaled, async_op=True).wait()
        group.all_gather_into_tensor(block, scaled)
    for value in (1.0, 5.0):
        tensor.fill_(value * (group.rank + 1))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(block, torch.full_like(block, value * group.size * (group.size + 1)))


def coalesced(group: ProcessGroup, device: torch.device) -> None:
    assert isinstance(group, NcclGroup)
    tensors = [torch.full((n,), float(group.rank + n), device=device) for n in (3, 1000, 70_001)]
    with group.coalescing():
        works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[0].wait()
    for n, tensor in zip((3, 1000, 70_001), tensors, strict=True):
        assert torch.equal(tensor, torch.full_like(tensor, group.size * n + group.size * (group.size - 1) / 2))


def transfers(group: ProcessGroup, device: torch.device) -> None:
    """All receive first, then all send first; NCCL connects two ranks at their first transfer, and waits there."""
    if group.size == 1:
        return
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    for number in range(4):
        incoming = torch.zeros(1000, device=device)
        outgoing = torch.full((1000,), float(10 * number + group.rank), device=device)
        calls = [lambda: group.recv(incoming, left, async_op=True), lambda: group.send(outgoing, right, async_op=True)]  # noqa: B023
        for work in [call() for call in calls[:: 1 if number % 2 == 0 else -1]]:
            work.wait()
        assert torch.equal(incoming, torch.full_like(incoming, 10 * number + left))


def calls_that_differ(group: ProcessGroup, device: torch.device) -> None:
    """NCCL waits for ever in calls of different sizes, and so in the barrier behind them. The barrier raises all the same."""
    if group.size == 1:
        return
    part = group.split(0)
    assert part is not None
    part.barrier()
    part.all_reduce(torch.ones(4 + group.rank, device=device), async_op=True)
    with pytest.raises(DisagreementError, match=r"rank 1 called all_reduce\(float32\[5\], op=SUM\)"):
        part.barrier()
    group.barrier()


def a_second_gpu_is_refused(group: ProcessGroup, device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        return
    other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    group.all_reduce(torch.ones(2, device=device))
    with pytest.raises(InvalidArgumentError, match=f"the group serves {device}, .* found tensors on {other}"):
        group.all_reduce(torch.ones(2, device=other))
    if group.size > 1:
        with pytest.raises(InvalidArgumentError, match=f"the group serves {device}"):
            group.send(torch.ones(2, device=other), (group.rank + 1) % group.size)


def closing_with_a_graph_alive(group: ProcessGroup, device: torch.device) -> None:
    """NCCL keeps a communicator while a graph refers to it. For one rank it launches nothing, so no graph does."""
    if group.size == 1:
        return
    part = group.split(0)
    assert part is not None
    tensor = torch.ones(5, device=device)
    part.all_reduce(tensor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        part.all_reduce(tensor, async_op=True).wait()
    connections._GRAPHS_S = 3.0
    with pytest.raises(TransportError, match=r"A CUDA graph .* is still alive"):
        part.close()
    graph.reset()


def two_ranks_on_one_gpu_by_accident(group: ProcessGroup, device: torch.device) -> None:
    with pytest.raises(DisagreementError, match="ranks 0 and 1 have both chosen the GPU"):
        group.all_reduce(torch.ones(1, device=device))


def a_peer_that_is_killed(group: ProcessGroup, device: torch.device) -> None:
    """NCCL reports it, or, within one node, reports nothing: then the deadline does."""
    part = group.split(0, timeout_s=10.0)
    assert part is not None
    part.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = part.all_reduce(torch.ones(5, device=device), async_op=True)
    with pytest.raises(TransportError, match="all_reduce"):
        work.wait(60)
    group.abort()  # the other rank cannot close it
    # NCCL may take longer to abort than the process waits for it, and the libraries must not be taken down below it.
    print(f"rank {group.rank}: a_peer_that_is_killed passed", flush=True)
    os._exit(0)


def the_others_go_on(group: ProcessGroup, device: torch.device) -> None:
    """The last of three ranks is killed. The others make a smaller group, over the host and the GPUs."""
    group.all_reduce(torch.ones(5, device=device))
    torch.cuda.synchronize()
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError):
        group.all_reduce(torch.ones(5, device=device), async_op=True).wait(60)
    smaller = group.shrink()
    assert smaller.size == 2
    tensor = torch.full((1000,), smaller.rank + 1.0, device=device)
    smaller.all_reduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, 3.0))
    smaller.close()
    print(f"rank {group.rank}: the_others_go_on passed", flush=True)
    os._exit(0)  # as in `a_peer_that_is_killed`


def a_rank_that_does_not_come(group: ProcessGroup, device: torch.device) -> None:
    """The last part: it uses the group up. Rank 0 ends with the collective's name."""
    part = group.split(0, timeout_s=10.0)
    assert part is not None
    part.barrier()
    if group.rank == 0 and group.size > 1:
        tensor = torch.ones(5, device=device)
        work = part.all_reduce(tensor, async_op=True)
        with pytest.raises(CollectiveTimeout, match=r"all_reduce\(float32\[5\], op=SUM\)"):
            work.wait(60)
        with pytest.raises(TransportError, match="had failed before"):
            part.barrier()
        torch.cuda.synchronize()  # the kernel has left the GPU
    group.barrier()


def main(rank: int, size: int, folder: Path) -> None:
    names = (folder / "parts").read_text().split()
    if ACCIDENT in names:
        device = torch.device("cuda", 0)
    else:
        device = choose_gpu(rank, size)
    torch.cuda.set_device(device)
    if LOSS in names:
        group = connect("cpu:gloo,cuda:nccl", rank, size, folder, timeout_s=15.0)
    else:
        group = connect("nccl", rank, size, folder)
    for name in names:
        globals()[name](group, device)
        print(f"rank {rank}: {name} passed", flush=True)
    destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
