"""Works of torch.distributed; what they have in common with others is in the conformance suite."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import CollectiveTimeout, DisagreementError, InvalidArgumentError, ProcessGroup, TransportError
from syncline.collectives.engine.cancel_scope import DEFAULT_TIMEOUT_S
from syncline.collectives.internal import message_device
from syncline.collectives.testing.processes import run_processes
from syncline.collectives.torch_bridge.torch_group import TorchGroup, as_process_group
from test_support.forked import answer_of, in_fork

JOB = Path(__file__).parent / "leaving_job.py"
DROPPING_JOB = Path(__file__).parent / "dropping_job.py"


@pytest.mark.launch
def test_a_program_that_ends_while_torchs_thread_drops_what_it_called(tmp_path: Path) -> None:
    """See Note [Leaving while torch's thread drops what it called]: without a wait at exit rank 0 aborts."""
    run_processes(JOB, 2, tmp_path)


@pytest.mark.launch
def test_a_model_that_is_dropped_while_torchs_thread_drops_what_it_called(tmp_path: Path) -> None:
    """See Note [Who destroys a group]: if we do not keep the group, the program hangs."""
    run_processes(DROPPING_JOB, 2, tmp_path)


class Refusing:
    """A torch group with a broken connection."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:45761")

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:45761")


def test_a_transfer_that_cannot_begin_is_our_error() -> None:
    group = TorchGroup(Refusing())  # type: ignore[arg-type]
    for begin in (group.send, group.recv):
        with pytest.raises(TransportError, match="Connection closed by peer"):
            begin(torch.ones(1), 1)


class OnGpusOnly(Refusing):
    """A torch group that was made with "nccl": torch raises "No backend type associated with device type cpu"."""

    _device_types = (torch.device("cuda"),)


def test_a_group_of_torchs_nccl_serves_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    group = TorchGroup(OnGpusOnly())  # type: ignore[arg-type]
    assert group.device_types == {"cuda"}
    assert message_device(group) == torch.device("cuda", 3)
    assert message_device(group, torch.device("cuda", 1)) == torch.device("cuda", 1)
    with pytest.raises(InvalidArgumentError, match="cpu"):
        group.all_reduce(torch.ones(1))
    with group.marked("a forward"):
        pass
    assert group.agree_on_calls() is None
    assert message_device(TorchGroup(Refusing())) == torch.device("cpu")  # type: ignore[arg-type]


class Recording:
    """A torch group that notes the address of each tensor that this rank sends in an all-to-all."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.sent: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def alltoall_base(self, received: torch.Tensor, sent: torch.Tensor, *rest: Any) -> Any:
        self.sent.append(sent.data_ptr())
        return self._group.alltoall_base(received, sent, *rest)


def test_reduce_scatter_tensor_sends_the_input_without_a_copy() -> None:
    recording = Recording(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, dist.default_pg_timeout))
    group = TorchGroup(recording)  # type: ignore[arg-type]
    whole, output = torch.arange(6.0).view(2, 3), torch.zeros(6)
    group.reduce_scatter_tensor(output, whole)
    assert output.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert recording.sent == [whole.data_ptr()]


def two_ranks() -> list[TorchGroup]:
    """Two ranks of Gloo in this process."""
    store, made = dist.HashStore(), dict[int, dist.ProcessGroupGloo]()

    def connect(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, dist.default_pg_timeout)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [TorchGroup(made[rank]) for rank in range(2)]


@pytest.mark.parametrize("timeout", [0.5, 0.0004])
def test_a_work_that_a_wait_gave_up_can_still_succeed(timeout: float) -> None:
    """torch counts whole milliseconds, and takes 0 for no limit."""
    first, second = two_ranks()
    tensor = torch.ones(3)
    work = first.all_reduce(tensor, async_op=True)
    late = threading.Timer(10, lambda: second.all_reduce(torch.ones(3)))  # so that a wait without a limit ends, too
    late.start()
    with pytest.raises(CollectiveTimeout):
        work.wait(timeout)
    late.cancel()
    second.all_reduce(torch.ones(3))
    work.wait()
    assert work.exception() is None
    assert tensor.tolist() == [2.0] * 3


CALLS: dict[str, Callable[[ProcessGroup], object]] = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(2)),
    "broadcast": lambda group: group.broadcast(torch.ones(2), 0),
    "barrier": lambda group: group.barrier(),
    "send": lambda group: group.send(torch.ones(1), 1),
    "recv": lambda group: group.recv(torch.ones(1), 1),
    "agree_on_calls": lambda group: group.agree_on_calls(),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_refuses_every_call_on_a_group_of_torch_of_its_parent() -> None:
    group, other = two_ranks()
    work = group.all_reduce(torch.ones(3), async_op=True)
    with group.marked("a forward"):
        pass

    def in_child() -> list[tuple[str, object]]:
        again = TorchGroup(group.torch_group)
        with again.marked("a forward"):
            pass
        calls = [(name, lambda call=call, made=made: call(made)) for made in (group, again) for name, call in CALLS.items()]
        calls += [("wait", work.wait), ("get_future", work.get_future)]
        return [(name, answer_of(call)) for name, call in calls] + [("is_completed", work.is_completed())]

    *said, (_, is_completed) = in_fork(in_child)
    assert is_completed is False
    for name, text in said:
        assert str(text).startswith(f"GroupClosedError: {name} on "), (name, text)
    other.all_reduce(torch.ones(3))
    work.wait()  # the rank goes on


def test_a_failed_last_step_is_not_repeated() -> None:
    groups = two_ranks()
    for rank, group in enumerate(groups):
        with group.marked(f"part {rank}"):
            pass
    works = [group.agree_on_calls(async_op=True) for group in groups]

    def failure(work: Any) -> str:
        with pytest.raises(DisagreementError) as caught:
            work.wait()
        return str(caught.value)

    with ThreadPoolExecutor() as pool:  # the last step is a collective
        first = list(pool.map(failure, works))
    for work, error in zip(works, first, strict=True):
        assert work is not None
        assert work.is_completed()
        assert failure(work) == error
        assert isinstance(work.exception(), DisagreementError)
        with pytest.raises(RuntimeError, match="DisagreementError"):  # torch's futures wrap errors
            work.get_future().wait()


@pytest.mark.parametrize(("torch_limit_s", "limit_s"), [(7200.0, 7200.0), (5.0, DEFAULT_TIMEOUT_S)])
def test_a_group_of_torch_keeps_its_time_limit(torch_limit_s: float, limit_s: float) -> None:
    """torch counts a shorter limit from the moment at which a call runs. We would count from the moment of the call."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=timedelta(seconds=torch_limit_s))
    try:
        assert as_process_group(None).timeout_s == limit_s
    finally:
        dist.destroy_process_group()
