"""How a group ends: what `close` and `abort` do, and that a failure reaches everybody, whatever else goes wrong."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import CollectiveTimeout, GroupClosedError, MisuseError, TransportError
from syncline.collectives.transports.nccl import connections
from syncline.collectives.transports.nccl.communicator import Communicator
from syncline.collectives.transports.nccl.connections import Connector
from syncline.collectives.transports.nccl.group import NcclGroup
from syncline.collectives.transports.nccl.rendezvous import GroupRendezvous, StoreRendezvous
from syncline.collectives.transports.nccl.work import Failure
from test_support.fake_device import FakeDevice, FakeEvent
from test_support.fake_nccl import FakeNccl, NcclError
from test_support.fake_nccl_group import NcclGroupOnFakes, run_on_fakes
from test_support.forked import answer_of, in_fork

PATIENCE_S = 10.0


def alone(device: FakeDevice | None = None, *, timeout_s: float = PATIENCE_S) -> NcclGroup:
    connector = Connector(FakeNccl(), device or FakeDevice(), StoreRendezvous(dist.HashStore()), [0], 0, "alone")
    return NcclGroupOnFakes(connector, timeout_s=timeout_s)


def raw_communicators(group: NcclGroup):
    return [made.communicator._raw for made in group._connections._made]


# ---- close tells of a failure that nobody has heard of ----


@pytest.mark.ranks
def test_close_tells_of_a_failure() -> None:
    """A peer dies in the last backward: without this the job would end well, with garbage."""

    def body(group: NcclGroup) -> None:
        group.barrier()
        if group.rank == 1:
            return
        group.all_reduce(torch.ones(3), async_op=True)
        raw_communicators(group)[0].break_down(NcclError(6, "remote process exited"))
        with pytest.raises(TransportError, match="remote process exited"):
            group.close()
        group.close()

    run_on_fakes(2, body)


@pytest.mark.ranks
def test_close_does_not_tell_twice() -> None:
    def body(group: NcclGroup) -> None:
        group.barrier()
        if group.rank == 0:
            group.timeout_s = 0.5
            work = group.all_reduce(torch.ones(3), async_op=True)
            with pytest.raises(CollectiveTimeout):
                work.wait(PATIENCE_S)
            group.close()

    run_on_fakes(2, body)


@pytest.mark.ranks
def test_close_tells_of_work_that_does_not_finish() -> None:
    def body(group: NcclGroup) -> None:
        group.barrier()
        if group.rank == 0:
            group.timeout_s = PATIENCE_S
            group.all_reduce(torch.ones(3), async_op=True)
            group.timeout_s = 0.2
            with pytest.raises(TransportError, match="did not finish when the group was closed on rank 0 of 2"):
                group.close()

    run_on_fakes(2, body)


def test_a_closed_group_refuses_calls_that_need_no_gpu() -> None:
    """The other ranks would not come."""
    connector = Connector(FakeNccl(), FakeDevice(), StoreRendezvous(dist.HashStore()), [0, 1], 0, "g")
    group = NcclGroupOnFakes(connector, timeout_s=1)
    group.abort()
    calls = (partial(group.split, 0), partial(group.subset, [0], "part"), group.agree_on_calls)
    for call in (*calls, partial(group.agree_on_calls, async_op=True)):
        with pytest.raises(GroupClosedError):
            call()


def test_a_group_that_has_failed_makes_no_parts() -> None:
    group = alone()
    group._in_flight.fail(TransportError("a cable was pulled"))
    for call in (partial(group.split, 0), partial(group.subset, [0], "part")):
        with pytest.raises(TransportError, match=r"(?s)was not started .* a cable was pulled"):
            call()


@pytest.mark.parametrize("how", ["drop", "destroy", "abort"])
def test_a_communicator_is_freed_only_after_its_end(how: str) -> None:
    """CuPy destroys what it frees, which may wait for ranks that never come: at exit, or in the garbage collector."""
    nccl = FakeNccl()
    communicator = Communicator.connect(nccl, nccl.get_unique_id(), 0, 1, stream=1)
    raw = weakref.ref(communicator._raw)
    if how != "drop":
        getattr(communicator, how)()
    del communicator
    gc.collect()
    assert (raw() is None) == (how != "drop")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # from Python 3.12 on
def test_a_forked_child_is_refused_what_is_in_flight() -> None:
    connector = Connector(FakeNccl(), FakeDevice(), StoreRendezvous(dist.HashStore()), [0, 1], 0, "g")
    group = NcclGroupOnFakes(connector, timeout_s=60)
    work, unasked = (group.recv(torch.zeros(1), 1, async_op=True) for _ in range(2))
    future = work.get_future()
    calls = {"wait": work.wait, "get_future": unasked.get_future, "future": future.wait, "split": partial(group.split, 0)}
    calls |= {"agree_on_calls": group.agree_on_calls}
    said = in_fork(lambda: {"over": work.is_completed(), **{name: answer_of(call) for name, call in calls.items()}})
    assert not said.pop("over")
    assert {name: text.split(":")[0] for name, text in said.items()} == dict.fromkeys(calls, "GroupClosedError")
    group.abort()


# ---- a CUDA graph keeps a communicator ----


@pytest.mark.ranks
def test_close_names_a_graph_that_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_GRAPHS_S", 0.2)

    def body(group: NcclGroup) -> None:
        group.all_reduce(torch.ones(2))
        device = group._runtime
        assert isinstance(device, FakeDevice)
        device.captures = True
        group.all_reduce(torch.ones(2), async_op=True).wait()
        device.captures = False
        delete_graph = raw_communicators(group)[0].enter_a_graph()
        words = rf"close on rank {group.rank} of 2.*within 0\.2 s\. A CUDA graph .* is still alive: delete"
        with pytest.raises(TransportError, match=words):
            group.close()
        delete_graph()

    run_on_fakes(2, body)


@pytest.mark.ranks
def test_close_waits_for_the_others_where_there_is_no_graph() -> None:
    def body(group: NcclGroup) -> None:
        group.all_reduce(torch.ones(2))
        group.set_timeout(0.2)
        let_go = raw_communicators(group)[0].enter_a_graph()
        with pytest.raises(TransportError, match="waits for the other ranks, which must close the group"):
            group.close()
        let_go()

    run_on_fakes(2, body)


@pytest.mark.ranks
def test_abort_waits_for_no_graph() -> None:
    group = alone()
    group.all_reduce(torch.ones(2))
    raw = raw_communicators(group)[0]
    let_go, is_aborted = threading.Event(), threading.Event()
    raw.abort = lambda: (let_go.wait(PATIENCE_S), is_aborted.set())
    group.abort()
    assert not is_aborted.is_set()
    let_go.set()
    assert is_aborted.wait(PATIENCE_S)


# ---- threads ----


@pytest.mark.ranks
def test_every_thread_that_asks_cuda_has_chosen_the_gpu() -> None:
    """Those that connect, transfer, watch and give back."""
    chosen: set[str] = set()

    class Choosing(FakeDevice):
        def background(self, device: torch.device):
            chosen.add(threading.current_thread().name)
            return super().background(device)

    def body(group: NcclGroup) -> None:
        group.barrier()
        tensor = torch.full((2,), float(group.rank))
        (group.send(tensor, 1, async_op=True) if group.rank == 0 else group.recv(tensor, 0, async_op=True)).wait()

    run_on_fakes(2, body, runtime=Choosing)
    # The monitor looks only if something is in flight for as long as it takes to its next look.
    assert chosen - {"syncline-look"} == {f"syncline-nccl-{what}" for what in ("connect", "pair", "destroy")}


# ---- waiters ----


class FaultyEvent(FakeEvent):
    def is_over(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def order_current_stream(self) -> None:
        self.is_over()


@pytest.mark.ranks
@pytest.mark.parametrize("ask", [lambda work: work.wait(), lambda work: work.wait(5), lambda work: work.is_completed()])
def test_a_fault_of_the_gpu_has_a_name(ask) -> None:
    group = alone()
    work = group.all_reduce(torch.ones(2), async_op=True)
    work.wait(PATIENCE_S)
    work._event = work.launch._event = FaultyEvent(FakeDevice())
    with pytest.raises(TransportError, match=r"the GPU reported, while the group waited for all_reduce.*illegal memory"):
        ask(work)
    group.abort()


@pytest.mark.ranks
def test_a_barrier_says_whose_time_limit_it_was() -> None:
    both = threading.Barrier(2)

    def body(group: NcclGroup) -> None:
        group.all_reduce(torch.ones(1))
        if group.rank == 0:
            work = group.barrier(async_op=True)
            work.launch.scope.cancel(TimeoutError())
            with pytest.raises(CollectiveTimeout, match=r"within the 20 s timeout of the group|did not finish within 20 s"):
                work.wait()
        both.wait(PATIENCE_S)
        group.abort()  # to close it would tell that only one rank has called the barrier

    run_on_fakes(2, body, timeout_s=20)


@pytest.mark.ranks
def test_waiting_for_an_open_batch_is_refused() -> None:
    group = alone()
    with pytest.raises(MisuseError, match="its batch is still open"), group.coalescing():
        group.all_reduce(torch.ones(2), async_op=True).wait()
    group.close()


@pytest.mark.ranks
def test_a_failure_and_a_question_for_the_future_may_meet() -> None:
    """Whoever comes first completes it; the other must not."""
    group = alone()
    group.all_reduce(torch.ones(2))
    for _ in range(50):
        work = group.all_reduce(torch.ones(2), async_op=True)
        start, errors = threading.Barrier(2), []

        def fail(work=work, start=start, errors=errors) -> None:
            start.wait()
            try:
                work.fail(Failure(TransportError("over")))
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=fail)
        thread.start()
        start.wait()
        work.get_future()
        thread.join()
        assert errors == []
    group.close()


# ---- where the ranks met ----


class Host:
    """A host group that notes its end."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def close(self) -> None:
        self.ended.append("close")

    def abort(self) -> None:
        self.ended.append("abort")


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_group_to_meet_in_ends_with_the_group_that_owns_it(owned: bool, how: str) -> None:
    host = Host()
    connector = Connector(FakeNccl(), FakeDevice(), GroupRendezvous(host, owned=owned), [0], 0, "g")
    group = NcclGroupOnFakes(connector, timeout_s=1)
    getattr(group, how)()
    assert host.ended == ([how] if owned else [])
