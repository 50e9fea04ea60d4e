"""CUDA tensors over a host transport, on a real device."""

from __future__ import annotations

import pytest
import torch

from syncline.collectives import ProcessGroup, ReduceOp
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.cuda import CudaRuntime, cuda_runtime
from syncline.collectives.transports.device import DeviceTransport
from syncline.collectives.transports.threads import InProcessTransport, SharedState

NUMEL = 1 << 20


def test_no_layer_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_runtime() is None


def test_host_memory_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device torch was told to make tensors on: those cannot be pinned."""
    asked: dict[str, object] = {}
    monkeypatch.setattr(torch, "empty", lambda *size, **options: asked.update(options))
    CudaRuntime().empty_on_host(torch.ones(3))
    assert asked == {"device": "cpu", "dtype": torch.float32, "pin_memory": True}


def on_two_ranks(check) -> None:
    shared_state = SharedState(2)

    def body(outer: ProcessGroup) -> None:
        device = CudaRuntime()
        transport = DeviceTransport(InProcessTransport(shared_state, outer.rank), outer.rank, device)
        group = HostGroup(transport, outer.rank, 2, timeout_s=60, device=device)
        with torch.cuda.stream(torch.cuda.Stream()):
            check(group)
        group.close()

    run_ranks(2, body)


def late_ones(rank: int) -> torch.Tensor:
    """Rank + 1 everywhere, but only after the device has been busy for some milliseconds."""
    tensor = torch.zeros(NUMEL, device="cuda")
    torch.cuda._sleep(20_000_000)
    return tensor.add_(rank + 1)


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnADevice:
    def test_inputs_are_waited_for_and_results_are_in_order(self) -> None:
        def check(group: ProcessGroup) -> None:
            for is_async in (False, True):
                tensor = late_ones(group.rank)
                group.all_reduce(tensor, async_op=is_async).wait()
                assert tensor.add_(1).eq(4).all()

        on_two_ranks(check)

    def test_a_callback_is_in_order(self) -> None:
        def check(group: ProcessGroup) -> None:
            future = group.all_reduce(late_ones(group.rank), ReduceOp.AVG, async_op=True).get_future()
            halved = future.then(lambda done: done.value()[0] / 2)
            assert halved.wait().eq(0.75).all()

        on_two_ranks(check)

    def test_lists_strides_and_halves(self) -> None:
        def check(group: ProcessGroup) -> None:
            mine = torch.full((4, 6), group.rank + 1.0, device="cuda", dtype=torch.bfloat16).t()
            outputs = [torch.empty_like(mine) for _ in range(2)]
            group.all_gather(outputs, mine)
            assert [output.unique().tolist() for output in outputs] == [[1.0], [2.0]]
            group.all_to_all(outputs, [mine, mine * 10])
            assert outputs[0].unique().tolist() == [1.0 if group.rank == 0 else 10.0]
            assert outputs[0].is_cuda

        on_two_ranks(check)

    def test_send_and_recv(self) -> None:
        def check(group: ProcessGroup) -> None:
            if group.rank == 0:
                group.send(late_ones(4), 1)
            else:
                tensor = torch.zeros(NUMEL, device="cuda")
                group.recv(tensor, 0)
                assert tensor.eq(5).all()

        on_two_ranks(check)

    def test_memory_may_be_freed_while_in_flight(self) -> None:
        """The caller keeps neither tensor nor work, and takes what the allocator gives it next."""

        def check(group: ProcessGroup) -> None:
            outputs = [torch.zeros(2 * NUMEL, device="cuda") for _ in range(4)]
            for output in outputs:
                group.all_gather_into_tensor(output, late_ones(group.rank), async_op=True)
                torch.full((NUMEL,), -1.0, device="cuda")
            group.barrier()
            torch.cuda.synchronize()
            for output in outputs:
                assert output.view(2, NUMEL).unique(dim=1).flatten().tolist() == [1.0, 2.0]

        on_two_ranks(check)

    def test_a_default_device_is_not_the_hosts(self) -> None:
        def check(group: ProcessGroup) -> None:
            with torch.device("cuda"):
                tensor = late_ones(group.rank)
                group.all_reduce(tensor)
                assert tensor.eq(3).all()

        on_two_ranks(check)
