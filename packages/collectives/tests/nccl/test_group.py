"""Order, memory, transfers, coalescing and capture, on the fakes."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import CollectiveTimeout, InvalidArgumentError, MisuseError, TransportError, Work
from syncline.collectives.engine.call import DONE, FAILED
from syncline.collectives.engine.device import Event
from syncline.collectives.transports.nccl.connections import Connector
from syncline.collectives.transports.nccl.group import NcclGroup
from syncline.collectives.transports.nccl.rendezvous import StoreRendezvous
from test_support.fake_device import CPU, FakeDevice, FakeEvent, FakeStream, the_rest_is_the_gpus
from test_support.fake_nccl import FakeNccl
from test_support.fake_nccl_group import NcclGroupOnFakes, run_on_fakes

pytestmark = pytest.mark.ranks


def alone(device: FakeDevice | None = None, timeout_s: float = 10.0) -> NcclGroup:
    connector = Connector(FakeNccl(), device or FakeDevice(), StoreRendezvous(dist.HashStore()), [0], 0, "alone")
    return NcclGroupOnFakes(connector, timeout_s=timeout_s)


def on_rank(rank: int, make: Callable[[str], FakeDevice]) -> Callable[[str], FakeDevice]:
    """A `runtime` of `run_on_fakes` that makes one rank's device in another way."""
    return lambda pci_id: (make if pci_id == f"0000:{rank:02x}:00.0" else FakeDevice)(pci_id)


def test_all_may_ask_for_futures_of_transfers_first() -> None:
    """In a ring of three: nobody is kept from the next call by a peer that has not connected."""

    def body(group: NcclGroup) -> None:
        left, right = (group.rank - 1) % 3, (group.rank + 1) % 3
        tensor = torch.zeros(4)
        future = group.recv(tensor, left, async_op=True).get_future().then(lambda done: done.value()[0].sum().item())
        sending = group.send(torch.full((4,), float(group.rank)), right, async_op=True)
        assert future.wait() == 4.0 * left
        sending.wait()

    run_on_fakes(3, body)


def test_transfers_between_two_ranks_arrive_in_order() -> None:
    def body(group: NcclGroup) -> None:
        peer = 1 - group.rank
        outgoing = [torch.tensor([100 * group.rank + n]) for n in range(5)]
        incoming = [torch.zeros(1, dtype=torch.int64) for _ in range(5)]
        works = [group.send(tensor, peer, async_op=True) for tensor in outgoing]
        works += [group.recv(tensor, peer, async_op=True) for tensor in incoming]
        for work in works:
            work.wait()
        assert [int(tensor) for tensor in incoming] == [100 * peer + n for n in range(5)]

    run_on_fakes(2, body)


def test_the_first_transfers_connect_whatever_comes_first() -> None:
    """NCCL keeps the CPU at the first call of each direction until the peer makes its counterpart."""

    def body(group: NcclGroup) -> None:
        peer = 1 - group.rank
        incoming, outgoing = torch.zeros(1), torch.full((1,), float(group.rank))
        calls = [partial(group.recv, incoming, peer), partial(group.send, outgoing, peer)]
        for call in calls:  # both receive first
            call(async_op=True)
        group.barrier()
        for work in [call(async_op=True) for call in reversed(calls)]:  # and when connected both send first
            work.wait(10)
        assert float(incoming) == peer

    run_on_fakes(2, body, timeout_s=10)


def test_a_pair_connects_though_the_program_waits_for_a_later_collective() -> None:
    """The other rank begins that collective after the transfer for which the pair connects."""
    program_waits = threading.Event()

    class ConnectsLate(FakeDevice):
        def background(self, device: torch.device) -> AbstractContextManager[object]:
            if threading.current_thread().name == "syncline-nccl-pair":
                assert program_waits.wait(10)
            return super().background(device)

    def body(group: NcclGroup) -> None:
        group.barrier()  # connects all ranks
        message, total = torch.full((1,), 5.0 * (1 - group.rank)), torch.ones(1)
        if group.rank == 0:
            transfer = group.send(message, 1, async_op=True)
            collective = group.all_reduce(total, async_op=True)
            collective.wait()  # puts a wait into the program's stream
            program_waits.set()
        else:
            transfer = group.recv(message, 0, async_op=True)
            transfer.wait()
            collective = group.all_reduce(total, async_op=True)
        transfer.wait(10)
        collective.wait(10)
        assert (message.item(), total.item()) == (5.0, 2.0)

    run_on_fakes(2, body, runtime=on_rank(0, ConnectsLate), timeout_s=10)


@pytest.mark.parametrize("name", ["gather", "send", "barrier"])
def test_the_future_of_a_call_without_outputs_orders_the_program(name: str) -> None:
    """A program may write what it sent as soon as it has waited."""
    may_run, is_held = threading.Event(), [False]

    class Held(FakeStream):
        def run(self, body: Callable[[], None], after: Event | None) -> FakeEvent:
            def later() -> None:
                the_rest_is_the_gpus()
                assert may_run.wait(10)
                body()

            return super().run(later if is_held[0] else body, after)

    class Holds(FakeDevice):
        stream_class = Held

    holding = Holds("0000:01:00.0")

    def call(group: NcclGroup) -> Work:
        tensor = torch.ones(1)
        if name == "barrier":
            return group.barrier(async_op=True)
        if name == "gather":
            return group.gather(tensor, [tensor.clone(), tensor.clone()] if group.rank == 0 else None, 0, async_op=True)
        return group.recv(tensor, 1, async_op=True) if group.rank == 0 else group.send(tensor, 0, async_op=True)

    def body(group: NcclGroup) -> None:
        call(group).wait(10)  # connects
        if group.rank == 1:
            is_held[0] = True
        work = call(group)
        if group.rank == 1:
            work.get_future().wait()
            waits = holding.current().waits()
            assert any(not event.has_come() for event in waits), "the program's stream waits"
            may_run.set()
        work.wait(10)

    run_on_fakes(2, body, runtime=on_rank(1, lambda _: holding), timeout_s=10)


def test_two_threads_may_send_to_one_peer() -> None:
    """NCCL takes one call at a time for each communicator."""
    inside, together = [0], []

    class Counting(FakeStream):
        def run(self, body: Callable[[], None], after: Event | None) -> FakeEvent:
            inside[0] += 1
            together.append(inside[0])
            try:
                return super().run(body, after)
            finally:
                time.sleep(1e-4)  # so that another thread would come in
                inside[0] -= 1

    class Counted(FakeDevice):
        stream_class = Counting

    def body(group: NcclGroup) -> None:
        (group.send if group.rank == 0 else group.recv)(torch.zeros(1), 1 - group.rank)  # connects
        if group.rank == 1:
            for _ in range(20):
                group.recv(torch.zeros(1), 0, async_op=True).wait()
            return
        together.clear()
        threads = [threading.Thread(target=lambda: [group.send(torch.zeros(1), 1) for _ in range(10)]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert together == [1] * 20

    run_on_fakes(2, body, runtime=on_rank(0, Counted))


def test_what_nccl_cannot_is_refused() -> None:
    group = alone()
    with pytest.raises(InvalidArgumentError, match="another rank"):
        group.send(torch.ones(1), 0)
    connector = Connector(FakeNccl(), FakeDevice(), StoreRendezvous(dist.HashStore()), [0, 1], 0, "g")
    group = NcclGroupOnFakes(connector, timeout_s=1)
    with pytest.raises(InvalidArgumentError, match="NCCL has no tags, found tag 3"):
        group.send(torch.ones(1), 1, tag=3)
    with pytest.raises(InvalidArgumentError, match="NCCL must know who sends"):
        group.recv(torch.ones(1))


@pytest.mark.parametrize("size", [1, 3])
def test_coalesced_collectives_give_the_same(size: int) -> None:
    def body(group: NcclGroup) -> None:
        index = torch.arange(12.0)
        strided = torch.zeros(4, 6).t()[::2]
        strided.copy_((group.rank + index).view(3, 4))
        copied = index * (group.rank + 1)
        rows = [torch.zeros(5) for _ in range(size)]
        with group.coalescing():
            work = group.all_reduce(strided, async_op=True)
            group.broadcast(copied, size - 1, async_op=True)
            group.all_gather(rows, torch.full((10,), float(group.rank))[::2], async_op=True)
        work.wait()
        assert torch.equal(strided, (size * index + size * (size - 1) / 2).view(3, 4))
        assert torch.equal(copied, index * size)
        assert [row.tolist() for row in rows] == [[float(rank)] * 5 for rank in range(size)]

    run_on_fakes(size, body)


def test_what_cannot_be_coalesced() -> None:
    group = alone()
    with pytest.raises(MisuseError, match="another coalescing context is open"), group.coalescing(), group.coalescing():
        pass
    calls = (
        partial(group.all_reduce, torch.ones(2)),
        partial(group.all_reduce, torch.ones(2, dtype=torch.int16), async_op=True),
        partial(group.barrier, async_op=True),
    )
    for call in calls:
        with pytest.raises(MisuseError, match="cannot be coalesced"), group.coalescing():
            call()
    group.all_reduce(torch.ones(2))
    with group.coalescing():
        pass
    group.close()


def test_each_call_of_a_batch_waits_for_the_stream_that_is_current_at_the_call() -> None:
    """Another stream may be current when the batch ends."""
    device = FakeDevice()
    group, side = alone(device), device.stream(CPU, is_own=False)
    written = FakeEvent(device, is_over=False)
    tensors, copies = [torch.zeros(2), torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]
    group.all_reduce(torch.ones(1))

    def write() -> None:
        for tensor in tensors:
            tensor.fill_(5.0)
        written.come(None)

    with device.running():
        with group.coalescing():
            with side.current():
                written.order_current_stream()
                work = group.all_gather_into_tensor(copies[0], tensors[0], async_op=True)
            group.all_gather_into_tensor(copies[1], tensors[1], async_op=True)
            threading.Timer(0.1, write).start()
        work.wait()
        assert [copy.tolist() for copy in copies] == [[5.0, 5.0], [5.0, 5.0]]
    group.close()


def test_a_batch_that_is_given_up_fails_its_work() -> None:
    group = alone()
    works, tensors = [], [torch.ones(2)]
    gone = weakref.ref(tensors[0])

    def give_up() -> None:
        with group.coalescing():
            works.append(group.all_gather_into_tensor(torch.ones(2), tensors.pop(), async_op=True))
            raise ValueError("the caller's own")

    with pytest.raises(ValueError, match="the caller's own"):
        give_up()
    with pytest.raises(ValueError, match="the caller's own"):
        works[0].wait()
    gc.collect()
    assert gone() is None  # although the program keeps the work
    group.all_reduce(torch.ones(2)).wait(10)
    assert [record.state for record in group.recorder.records()] == [FAILED, DONE]
    group.close()


def test_ctrl_c_at_the_end_of_a_batch_closes_the_batch() -> None:
    """As in a notebook, while a call of another thread is in its turn."""
    group = alone()
    turn, has_turn = group._queue._turn, threading.Event()

    class Interrupted:
        """A turn that another thread has: Ctrl-C comes when this thread waits for the turn."""

        def __enter__(self) -> None:
            if has_turn.is_set():
                raise KeyboardInterrupt
            turn.acquire()

        def __exit__(self, *_: object) -> None:
            turn.release()

    def fill() -> None:
        with group.coalescing():
            group.all_reduce(torch.ones(1), async_op=True)
            has_turn.set()

    group._queue._turn = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        fill()
    group._queue._turn = turn
    group.all_reduce(torch.ones(1))
    with group.coalescing():
        group.all_reduce(torch.ones(1), async_op=True)
    group.close()


def test_a_callback_may_issue_when_a_batch_ends() -> None:
    """It runs when the batch is issued, under no lock."""

    def body(group: NcclGroup) -> None:
        first, second = torch.ones(2), torch.zeros(2)

        def again(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            second.copy_(done.value()[0] + group.rank)
            group.all_reduce(second, async_op=True).wait()
            return second  # so that whoever waits for the future is ordered after this

        with group.coalescing():
            future = group.all_reduce(first, async_op=True).get_future().then(again)
        future.wait()
        assert second.tolist() == [5.0, 5.0]

    run_on_fakes(2, body)


def test_a_callback_may_issue_when_the_group_fails() -> None:
    """It is told of the failure by the thread that met it, which holds no lock either."""
    heard: list[BaseException] = []

    class Failing(FakeStream):
        def run(self, body: Callable[[], None], after: Event) -> FakeEvent:
            raise torch.OutOfMemoryError("out of memory")

    class Device(FakeDevice):
        stream_class = Failing

    group = alone(Device())

    def again(done: torch.futures.Future[list[torch.Tensor]]) -> None:
        try:
            group.all_reduce(torch.ones(2))
        except TransportError as error:
            heard.append(error)

    def issue() -> None:
        with group.coalescing():
            group.all_reduce(torch.ones(2), async_op=True).get_future().add_done_callback(again)

    with pytest.raises(torch.OutOfMemoryError):
        issue()
    assert "had failed before:\n  out of memory" in str(heard[0])


def test_outputs_are_free_once_they_were_waited_for() -> None:
    """Not only when the watchdog next looks: FSDP's gathered parameters would pile up."""
    group = alone()
    group.all_reduce(torch.ones(2))
    for number in range(20):
        tensor = torch.full((3,), float(number))
        gone = weakref.ref(tensor)
        work = group.all_reduce(tensor, async_op=True)
        work.wait()
        assert work.result()[0] is tensor
        del work, tensor
        assert gone() is None, number
    group.close()


def test_a_batch_that_comes_too_late_wakes_who_waits() -> None:
    """The group has failed while it was filled."""
    group = alone()
    group.all_reduce(torch.ones(2))
    futures = []

    def issue() -> None:
        with group.coalescing():
            futures.append(group.all_reduce(torch.ones(2), async_op=True).get_future())
            group._in_flight.fail(TransportError("a cable was pulled"))

    with pytest.raises(TransportError, match=r"(?s)coalesced.* was not started .* a cable was pulled"):
        issue()
    with pytest.raises(TransportError, match="a cable was pulled"):
        futures[0].wait()


def test_memory_in_flight_is_held_until_the_stream_is_ordered() -> None:
    def body(group: NcclGroup) -> None:
        group.barrier()
        source = torch.full((3,), float(group.rank))
        block = torch.zeros(6)
        gone = weakref.ref(source)
        if group.rank == 0:
            # Rank 1 has not come: the collective is in flight.
            dropped = torch.zeros(6)
            dropped_is_gone = weakref.ref(dropped)
            group.all_gather_into_tensor(dropped, torch.zeros(3), async_op=True)
            work = group.all_gather_into_tensor(block, source, async_op=True)
            del source, dropped
            gc.collect()
            assert gone() is not None
            assert dropped_is_gone() is not None
            group.send(torch.zeros(1), 1, async_op=True).wait()
        else:
            group.recv(torch.zeros(1), 0)
            group.all_gather_into_tensor(torch.zeros(6), torch.zeros(3))
            work = group.all_gather_into_tensor(block, source, async_op=True)
            del source
        work.wait()
        assert block.tolist() == [0.0] * 3 + [1.0] * 3
        gc.collect()
        assert gone() is None or group.rank == 1

    run_on_fakes(2, body)


def test_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    group = alone(device)
    nccl_calls: list[Any] = []
    monkeypatch.setattr(FakeStream, "run", noting(FakeStream.run, nccl_calls))
    device.captures = True
    with pytest.raises(MisuseError, match="cannot be connected while a CUDA graph is captured"):
        group.all_reduce(torch.ones(2))
    device.captures = False
    group.all_reduce(torch.ones(2))
    device.captures = True
    tensor = torch.ones(2)
    work = group.all_reduce(tensor, async_op=True)
    assert not work.is_completed()
    completions: list[Any] = []
    monkeypatch.setattr(FakeStream, "complete", noting(FakeStream.complete, completions))
    work.get_future()
    assert completions == [{"captured": True}]
    work.wait()
    with pytest.raises(MisuseError, match="nothing can be waited for on the CPU"):
        work.wait(5)
    issued = len(nccl_calls)
    for is_async in (False, True):
        with pytest.raises(MisuseError, match=r"barrier\(\).*nothing can be waited for on the CPU"):
            group.barrier(async_op=is_async)
    with pytest.raises(MisuseError, match=r"sparse tensor.*a CUDA graph is being captured"):
        group.all_reduce(torch.ones(2).to_sparse())
    with pytest.raises(MisuseError, match="split"):
        group.split(0)
    assert len(nccl_calls) == issued
    device.captures = False
    assert work.is_completed()
    assert work.wait()
    group.close()


def noting(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def noted(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return function(*arguments, **options)

    return noted


def test_a_new_time_limit_counts_from_the_next_call() -> None:
    def body(group: NcclGroup) -> None:
        group.barrier()
        group.set_timeout(0.2)
        if group.rank == 0:
            with pytest.raises(CollectiveTimeout, match=r"did not finish within 0\.2 s"):
                group.all_reduce(torch.ones(1), async_op=True).wait(10)

    run_on_fakes(2, body)


def test_a_color_may_have_64_bits() -> None:
    """NCCL's own colors have 32 bits."""

    def body(group: NcclGroup) -> None:
        group.barrier()
        part = group.split(2**40 + group.rank % 2)
        assert part is not None
        tensor = torch.tensor([float(group.rank)])
        part.all_reduce(tensor)
        assert (part.ranks, tensor.item()) == (((0, 2), 2.0), ((1,), 1.0))[group.rank % 2]
        part.close()

    run_on_fakes(3, body)


def test_a_split_does_not_wait_for_transfers() -> None:
    """The other rank sends only after the split."""

    def body(group: NcclGroup) -> None:
        group.barrier()
        tensor = torch.full((3,), 5.0 * group.rank)
        work = group.recv(tensor, 1, async_op=True) if group.rank == 0 else None
        part = group.split(0)
        if work is None:
            group.send(tensor, 0)
        else:
            work.wait()
        assert tensor.tolist() == [5.0] * 3
        assert part is not None
        part.close()

    run_on_fakes(2, body)


@pytest.mark.parametrize("connected", [False, True])
def test_parts_of_a_group(connected: bool) -> None:
    """By ncclCommSplit where there is a communicator, else by a unique id of their own."""

    def body(group: NcclGroup) -> None:
        if connected:
            group.barrier()
        part = group.split(None if group.rank == 1 else 0, -group.rank)
        assert (part is None) == (group.rank == 1)
        if part is not None:
            assert part.ranks == (2, 0)
            tensor = torch.tensor([float(part.rank)])
            rows = [torch.zeros(1), torch.zeros(1)]
            part.all_gather(rows, tensor)
            assert [float(row) for row in rows] == [0.0, 1.0]
            part.close()
        group.barrier()

    run_on_fakes(3, body)


def test_allocate_and_words() -> None:
    group = alone()
    assert group.allocate(3, torch.float16).shape == (3,)
    assert group.describe() == "nccl: NCCL 2.27.7 through CuPy"
    assert group.backend_name == "nccl"


@pytest.mark.parametrize("over_host_group", [False, True])
def test_some_ranks_make_a_group_without_the_others(over_host_group: bool) -> None:
    def body(group: NcclGroup) -> None:
        for attempt in range(2):  # a name may come again
            if group.rank == 1:
                continue
            part = group.subset([2, 0], "part")
            assert (part.rank, part.ranks) == ({0: 1, 2: 0}[group.rank], (2, 0))
            tensor = torch.full((3,), float(group.rank + attempt))
            part.all_reduce(tensor)
            assert tensor.tolist() == [2.0 + 2 * attempt] * 3
            part.close()

    run_on_fakes(3, body, over_host_group=over_host_group)
