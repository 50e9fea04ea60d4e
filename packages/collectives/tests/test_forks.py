"""A fork of a rank: it has neither the rank's groups nor what is in flight. See Note [Forks]."""

from __future__ import annotations

import contextlib
import os
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import syncline.collectives as sc
from syncline.collectives import ProcessGroup, StoreError
from syncline.collectives.stores import InMemoryStore
from syncline.collectives.testing import run_ranks
from syncline.collectives.testing.processes import run_processes
from syncline.collectives.transports.shared_memory.segment import Segment, create_file, padded
from syncline.collectives.transports.threads import create_groups
from test_support.forked import answer_of, in_fork

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),  # from Python 3.12 on
]

CALLS: dict[str, Callable[[ProcessGroup], object]] = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(2)),
    "all_reduce, asynchronous": lambda group: group.all_reduce(torch.ones(3), async_op=True),
    "all_reduce, by a kept plan": lambda group: sc.all_reduce(torch.ones(4), group=group),
    "broadcast": lambda group: group.broadcast(torch.ones(2), 0),
    "barrier": lambda group: group.barrier(),
    "all_gather": lambda group: group.all_gather([torch.ones(1) for _ in range(group.size)], torch.ones(1)),
    "all_to_all_single": lambda group: group.all_to_all_single(torch.ones(group.size), torch.ones(group.size)),
    "send": lambda group: group.send(torch.ones(1), 1),
    "recv": lambda group: group.recv(torch.ones(1), 1),
    "split": lambda group: group.split(0),
    "subset": lambda group: group.subset([0], "part"),
    "allocate": lambda group: group.allocate(5, torch.float32),
    "all_gather, of objects": lambda group: sc.exchange_objects("mine", group=group),
    "recv, of a monitored barrier": lambda group: sc.monitored_barrier(group),
}


def test_every_call_on_a_group_is_refused_by_name() -> None:
    def body(group: ProcessGroup) -> None:
        for _ in range(2):
            sc.all_reduce(torch.ones(4), group=group)
        if group.rank == 0:
            said = in_fork(lambda: {name: answer_of(lambda call=call: call(group)) for name, call in CALLS.items()})
            for name, text in said.items():
                assert str(text).startswith(f"GroupClosedError: {name.split(',')[0]} on rank 0 of 2 in group 'ranks': this "), (
                    name
                )
                assert "is a fork of that rank, and only the rank itself communicates. Let the rank call it" in text
        group.barrier()  # the rank goes on
        total = torch.tensor([group.rank + 1.0])
        group.all_reduce(total)
        assert total.item() == 3

    run_ranks(2, body)


def test_who_this_process_is_can_be_asked_and_to_close_a_group_does_nothing() -> None:
    def body(group: ProcessGroup) -> None:
        def in_child() -> tuple[int, int]:
            group.close()
            group.abort()
            return group.rank, group.size

        if group.rank == 1:
            assert in_fork(in_child) == (1, 2)
        group.barrier()

    run_ranks(2, body)


def test_to_wait_for_what_is_in_flight_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 1:
            forked.wait(20)
        collective = group.all_reduce(tensor := torch.tensor([1.0 + group.rank]), async_op=True)
        future = collective.get_future().then(lambda done: done.value())
        if group.rank == 1:
            group.send(torch.tensor([5.0]), 0)
        else:
            received = group.recv(into := torch.zeros(1), 1, async_op=True)
            answers = in_fork(
                lambda: [answer_of(work.wait) for work in (collective, future, received)] + [received.is_completed()]
            )
            forked.set()
            assert answers.pop() is False
            assert all(str(text).startswith("GroupClosedError: wait on ") for text in answers), answers
            received.wait()
            assert into.item() == 5
        collective.wait()
        assert tensor.item() == 3

    forked = threading.Event()
    run_ranks(2, body)


def test_a_fork_may_make_a_group_of_its_own(tmp_path: Path) -> None:
    def in_child() -> list[float]:
        sc.destroy_process_group()  # the parent's is not closed by it
        group = sc.init_process_group("gloo", init_method=f"file://{tmp_path}/child", rank=0, world_size=1)
        tensor = torch.tensor([2.0])
        group.all_reduce(tensor)
        sc.destroy_process_group()
        return tensor.tolist()

    sc.init_process_group("gloo", init_method=f"file://{tmp_path}/parent", rank=0, world_size=1)
    try:
        assert in_fork(in_child) == [2.0]
        assert in_fork(lambda: in_fork(sc.barrier)).startswith("GroupClosedError: barrier on rank 0 of 1")
        sc.barrier()
    finally:
        sc.destroy_process_group()


def test_a_fork_does_not_wait_for_a_thread_of_its_parent_that_connects(tmp_path: Path) -> None:
    """Such as a worker of a DataLoader, while a thread waits for the other ranks."""

    class Store(InMemoryStore):
        def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
            connecting.set()
            forked.wait(30)
            raise StoreError("enough")

    def in_child() -> int:
        sc.destroy_process_group()
        return sc.init_process_group("gloo", init_method=f"file://{tmp_path}/child", rank=0, world_size=1).size

    connecting, forked = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        parent = pool.submit(sc.init_process_group, "gloo", rank=0, world_size=2, store=Store())
        assert connecting.wait(30)
        try:
            assert in_fork(in_child) == 1
        finally:
            forked.set()
        with pytest.raises(StoreError, match="enough"):
            parent.result()


def test_a_fork_says_nothing_of_a_group_that_was_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    group = sc.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    sc.destroy_process_group()
    assert in_fork(lambda: caplog.messages) == []
    assert group.rank == 0


def test_mpi_is_not_started_in_the_name_of_a_rank() -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    groups = create_groups(1)
    said = in_fork(lambda: sc.init_process_group("mpi"))
    assert said.startswith("LaunchError: backend 'mpi': this process is a fork of a rank, and MPI is that rank's alone")
    groups[0].close()


def test_the_end_of_a_fork_is_its_own(tmp_path: Path) -> None:
    """It waits for nobody, and what it does not close is the parent's. Both ranks fork while they communicate."""
    job = tmp_path / "job.py"
    job.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            import torch
            import syncline.collectives as sc

            rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
            group = sc.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
            for status in (0, 3):
                work = group.all_reduce(torch.ones(1000), async_op=True)
                if (child := os.fork()) == 0:
                    sys.exit(status)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
                work.wait()
            sc.destroy_process_group()
            """
        )
    )
    run_processes(job, 2, tmp_path)


# ---- shared memory ----


@pytest.fixture
def segment() -> Segment:
    """Two parts of 3,000 numbers each; this process has the second."""
    name = f"test-forks-{os.getpid()}"
    file = create_file(name, 2 * padded(12_000))
    made = Segment(file, 2, 12_000, 1)
    os.close(file)
    return made


def test_what_a_fork_writes_to_a_window_stays_there(segment: Segment) -> None:
    segment.holds_tensors = True
    mine, others = segment.view(1, 0, 3000, torch.float32), segment.view(0, 0, 3000, torch.float32)
    mine.copy_(torch.arange(3000.0))
    others.fill_(7)

    def in_child() -> tuple[bool, float]:
        mine.sub_(torch.arange(3000.0))
        others.fill_(9)
        return bool(mine.any()), float(others.sum())

    assert in_fork(in_child) == (False, 27_000)
    assert mine.tolist() == list(range(3000))
    assert others.tolist() == [7] * 3000


def test_a_fork_has_what_a_window_held_when_it_was_made(segment: Segment) -> None:
    """Not what its parent writes there later, nor the other ranks' parts."""
    segment.holds_tensors = True
    mine, others = segment.view(1, 0, 3000, torch.float32), segment.view(0, 0, 3000, torch.float32)
    others.fill_(7)
    for round_ in range(3):  # each time the pages of the copy become the fork's
        mine.copy_(torch.arange(3000.0) + round_)
        asked, told = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.read(asked[0], 1)
                right = torch.equal(mine, torch.arange(3000.0) + round_) and not others.any()
                os.write(told[1], b"y" if right else b"n")
            os._exit(0)
        mine.fill_(-1)
        os.write(asked[1], b"?")
        assert os.read(told[0], 1) == b"y"
        os.waitpid(child, 0)
        for end in (*asked, *told):
            os.close(end)


def test_memory_that_holds_no_tensors_is_zeros_in_a_fork(segment: Segment) -> None:
    """Barriers and staging areas: to copy them would be waste."""
    mine = segment.view(1, 0, 3000, torch.float32)
    mine.fill_(5)
    assert in_fork(lambda: float(mine.sum())) == 0
    assert float(mine.sum()) == 15_000
    assert segment._copy is None
