"""Forks of ranks over MPI: gradients in shared windows, collectives in flight on another thread, and the end of the fork."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import syncline.collectives as sc
from syncline.collectives import ProcessGroup
from syncline.ddp import DistributedDataParallel
from test_support.forked import answer_of, in_fork
from test_support.full_run import cases


def model_with_gradients(group: ProcessGroup, *, as_view: bool = False) -> torch.nn.Module:
    """A model after two steps. Its gradients (480 KB, 1,600 B, ...) lie in windows: (1 + 2 + ... + size) / size * 2."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 1, bias=False))
    torch.nn.init.ones_(module[1].weight)
    model = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=as_view)
    for _ in range(2):
        model.zero_grad()
        step(model, group)
    return model


def step(model: torch.nn.Module, group: ProcessGroup) -> None:
    model(torch.full((2, 300), 1.0 + group.rank)).sum().backward()


@pytest.mark.mpi
@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_of_a_fork_are_its_own(mpi_group: ProcessGroup, as_view: bool) -> None:
    model = model_with_gradients(mpi_group, as_view=as_view)
    gradient = model.module[0].weight.grad
    average = float(mpi_group.size + 1)
    assert gradient.unique().tolist() == [average]

    def clear_and_go_on() -> list[list[float]]:
        found = [gradient.unique().tolist()]
        gradient.zero_()
        model.module(torch.full((2, 300), 5.0)).sum().backward()
        return [*found, gradient.unique().tolist()]

    assert in_fork(clear_and_go_on) == [[average], [10.0]]
    assert gradient.unique().tolist() == [average]
    model.zero_grad()
    step(model, mpi_group)
    assert model.module[0].weight.grad.unique().tolist() == [average]


@pytest.mark.mpi
def test_a_fork_does_not_communicate_in_its_parents_name(mpi_group: ProcessGroup) -> None:
    group = mpi_group.split(0)
    assert group is not None
    group.barrier()
    if group.rank == 0:
        calls = [group.barrier, lambda: group.all_reduce(torch.ones(3)), lambda: group.recv(torch.ones(1), None)]
        said = in_fork(lambda: [answer_of(call) for call in calls])
        assert [text.split(":")[0] for text in said] == ["GroupClosedError"] * 3
        said = in_fork(lambda: sc.init_process_group("mpi"))
        # Which of the two is asked first depends on whether the rank took its place from the launcher.
        assert re.match(r"LaunchError: (this process is a child of rank 0|.* this process is a fork of a rank)", said)
    for count in range(3):  # the fork must not have counted as an arrival
        numbers = torch.tensor([group.rank + count])
        group.all_reduce(numbers)
        assert numbers.item() == group.size * (group.size - 1) // 2 + count * group.size
    group.close()


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")  # Intel MPI gives each rank one core
def test_data_loaders_and_pools_while_another_thread_communicates(mpi_group: ProcessGroup) -> None:
    """The thread that forks is not the one inside MPI, or in the middle of a window."""
    other = mpi_group.split(0)
    assert other is not None
    is_over = threading.Event()
    wrong: list[object] = []

    def communicate() -> None:
        while True:
            flag = torch.tensor([float(is_over.is_set())])
            other.all_reduce(flag)
            if flag.item() == other.size:
                return
            window = torch.full((70_000,), other.rank + 1.0)
            work = other.all_reduce(window, async_op=True)
            work.wait()
            if window[0] != other.size * (other.size + 1) / 2:
                wrong.append(window)

    thread = threading.Thread(target=communicate)
    thread.start()
    model = model_with_gradients(mpi_group)
    data = TensorDataset(torch.full((4, 300), 1.0 + mpi_group.rank))
    for _ in range(3):
        for (batch,) in DataLoader(data, 2, num_workers=2, multiprocessing_context="fork"):
            model.zero_grad()
            model(batch).sum().backward()
            assert model.module[0].weight.grad.unique().tolist() == [float(mpi_group.size + 1)]
    is_over.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not wrong
    other.close()


ENDS = """
import os, sys, time
import syncline.collectives as sc

group = sc.init_process_group(timeout=60)
for end in ("script", "exit", "status", "exception"):
    group.barrier()
    if (child := os.fork()) == 0:
        file = open(f"{sys.argv[1]}/{end}-{group.rank}", "w")
        file.write("written")  # and not closed
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == {"status": 3, "exception": 1}.get(end, 0), (end, status)
    assert open(f"{sys.argv[1]}/{end}-{group.rank}").read() == "written"
if child == 0:
    if end == "exit":
        sys.exit()
    if end == "status":
        sys.exit(3)
    if end == "exception":
        raise ValueError("of the fork")
else:
    total = group.rank + 1
    assert sum(sc.exchange_objects(total, group=group)) == 3
    os.write(1, f"rank {group.rank} is done\\n".encode())  # in one write, because the ranks share their output
    sc.destroy_process_group()
"""


@pytest.mark.launch
def test_the_end_of_a_fork_ends_neither_mpi_nor_the_job(run_job, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    job = run_job(2, "", str(script), str(tmp_path))
    assert job.status == 0, job.output
    for rank in range(2):
        assert f"rank {rank} is done" in job.output
    assert job.output.count("ValueError: of the fork") == 2
    assert "ends the job" not in job.output


WORKERS = """
import multiprocessing, subprocess, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import syncline.collectives as sc
from syncline.ddp import DistributedDataParallel

def square(number):
    return number * number

def train(method):
    group = sc.init_process_group(timeout=90)
    model = DistributedDataParallel(torch.nn.Linear(300, 400, bias=False))
    data = TensorDataset(torch.full((4, 300), 1.0 + group.rank))
    for _ in range(2):
        work = group.all_reduce(torch.ones(100_000), async_op=True)
        for (batch,) in DataLoader(data, 2, num_workers=1, multiprocessing_context=method):
            model.zero_grad()
            model(batch).sum().backward()
            assert model.module.weight.grad.unique().tolist() == [3.0]
        work.wait()
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map(square, [3, 4]) == [9, 16]
    done = subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, preexec_fn=lambda: None)
    assert done.stdout == b"7\\n"
    print("rank", group.rank, "trained with", method, flush=True)
    sc.destroy_process_group()

if __name__ == "__main__":
    train(sys.argv[1])
"""


@pytest.mark.launch
@pytest.mark.parametrize("method", cases(["fork"], in_full=["forkserver", "spawn"]))
def test_processes_that_ranks_start_by(run_job, tmp_path: Path, method: str) -> None:
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    job = run_job(2, "", str(script), method)
    assert job.status == 0, job.output
    for rank in range(2):
        assert f"rank {rank} trained with {method}" in job.output
