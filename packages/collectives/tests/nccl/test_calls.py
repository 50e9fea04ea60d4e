"""What each collective calls of NCCL, and in which order, recorded on rank 1 of 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.collectives import ReduceOp, premul_sum
from syncline.collectives.transports.nccl.connections import Connector
from syncline.collectives.transports.nccl.group import NcclGroup
from syncline.collectives.transports.nccl.rendezvous import Rendezvous
from test_support.fake_device import FakeDevice
from test_support.fake_nccl_group import NcclGroupOnFakes

SIZE, RANK = 3, 1
ID = bytes(range(128))
F32, F64, BF16, U8, I64 = 7, 8, 9, 1, 4
SUM, PROD, MAX, MIN, AVG = 0, 1, 2, 3, 4
STREAM = 1


class Recorder:
    """Stands for `cupy.cuda.nccl` and for its communicator; every call is written down, with tensors for addresses."""

    NcclError = RuntimeError

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.names: dict[int, str] = {}

    def get_version(self) -> int:
        return 22_707

    def get_unique_id(self) -> bytes:
        return ID

    def NcclCommunicator(self, *arguments: Any) -> Recorder:  # noqa: N802
        self.calls.append(("init", *arguments))
        return self

    def check_async_error(self) -> None:
        pass

    def destroy(self) -> None:
        self.calls.append(("destroy",))

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: int) -> None:
            self.calls.append((name, *(self.names.get(argument, argument) for argument in arguments)))

        return call


class Alone(Rendezvous):
    """The others say what this rank says."""

    def agree(self, topic, ranks, rank, payload, decide, scope):
        return decide([{**payload, "pci_id": f"{other}"} for other in ranks])

    def send(self, topic, to, sender, payload, scope) -> None: ...

    def _receive(self, topic, to, sender, scope): ...

    def announce(self, name, failure) -> None: ...

    def announced(self, name, ranks) -> None: ...


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def group(recorder: Recorder) -> NcclGroup:
    connector = Connector(recorder, FakeDevice(), Alone(), range(SIZE), RANK, "g")
    return NcclGroupOnFakes(connector, timeout_s=10)


def recorded(recorder: Recorder, call: Callable[[], Any], **tensors: torch.Tensor) -> list[tuple[Any, ...]]:
    """The calls, the first collective's connection left out; addresses of these tensors (and offsets) by name."""
    for name, tensor in tensors.items():
        recorder.names[tensor.data_ptr()] = name
        if tensor.numel() % SIZE == 0:
            for part in range(1, SIZE):
                recorder.names[tensor.data_ptr() + part * tensor.numel() // SIZE * tensor.element_size()] = f"{name}[{part}]"
    call()
    return [entry for entry in recorder.calls if entry[0] != "init"]


def test_the_communicator_is_made_by_the_first_collective(recorder: Recorder, group: NcclGroup) -> None:
    assert recorder.calls == []
    group.all_reduce(torch.ones(2))
    group.all_reduce(torch.ones(2))
    assert [call[0] for call in recorder.calls] == ["init", "allReduce", "allReduce"]
    assert recorder.calls[0] == ("init", SIZE, ID, RANK)
    group.close()
    assert recorder.calls[-1] == ("destroy",)


@pytest.mark.parametrize(
    ("dtype", "op", "count", "wire", "nccl_op"),
    [
        (torch.float32, ReduceOp.SUM, 5, F32, SUM),
        (torch.bfloat16, ReduceOp.AVG, 5, BF16, AVG),
        (torch.float64, ReduceOp.PRODUCT, 5, F64, PROD),
        (torch.int64, ReduceOp.MIN, 5, I64, MIN),
        (torch.bool, ReduceOp.MAX, 5, U8, MAX),
        (torch.bool, ReduceOp.BAND, 5, U8, MIN),
        (torch.bool, ReduceOp.BOR, 5, U8, MAX),
        (torch.complex64, ReduceOp.SUM, 10, F32, SUM),
        (torch.complex128, ReduceOp.AVG, 10, F64, AVG),
        (torch.float32, premul_sum(0.25), 5, F32, SUM),
    ],
)
def test_all_reduce(recorder: Recorder, group: NcclGroup, dtype, op, count, wire, nccl_op) -> None:
    tensor = torch.ones(5, dtype=dtype)
    calls = recorded(recorder, lambda: group.all_reduce(tensor, op), t=tensor)
    assert calls == [("allReduce", "t", "t", count, wire, nccl_op, STREAM)]
    if dtype is torch.float32 and op is not ReduceOp.SUM:
        assert tensor.tolist() == [0.25] * 5


def test_what_nccl_has_not_is_exchanged(recorder: Recorder, group: NcclGroup) -> None:
    calls = recorded(recorder, lambda: group.all_reduce(torch.ones(7, dtype=torch.int16)))
    assert [call[0] for call in calls] == ["groupStart", "send", "recv", "send", "recv", "groupEnd", "allGather"]
    # Slices of ceil(7 / 3) elements of two bytes each, as bytes.
    assert {call[2] for call in calls if call[0] in ("send", "recv")} == {6}
    assert calls[-1][3:] == (6, U8, STREAM)


def test_rooted(recorder: Recorder, group: NcclGroup) -> None:
    t, parts = torch.ones(4), torch.ones(12)
    assert recorded(recorder, lambda: group.reduce(t, 2), t=t) == [("reduce", "t", "t", 4, F32, SUM, 2, STREAM)]
    recorder.calls.clear()
    assert recorded(recorder, lambda: group.broadcast(t, 2)) == [("broadcast", "t", "t", 4, F32, 2, STREAM)]
    recorder.calls.clear()
    assert recorded(recorder, lambda: group.gather(t, None, 2)) == [("send", "t", 4, F32, 2, STREAM)]
    recorder.calls.clear()
    assert recorded(recorder, lambda: group.scatter(t, None, 0)) == [("recv", "t", 4, F32, 0, STREAM)]
    recorder.calls.clear()
    calls = recorded(recorder, lambda: group.scatter(t, list(parts.view(3, 4)), 1))
    assert [call[0] for call in calls] == ["groupStart", "send", "send", "groupEnd"]
    assert [call[2:] for call in calls[1:3]] == [(4, F32, 2, STREAM), (4, F32, 0, STREAM)]
    assert calls[1][1] - calls[2][1] == 2 * 4 * 4  # parts of one block
    recorder.calls.clear()
    names = [call[0] for call in recorded(recorder, lambda: group.gather(t, [torch.ones(4) for _ in range(3)], 1))]
    assert names == ["groupStart", "recv", "recv", "groupEnd"]


def test_one_and_many(recorder: Recorder, group: NcclGroup) -> None:
    small, large = torch.ones(4, dtype=torch.float8_e5m2), torch.ones(12, dtype=torch.float8_e5m2)
    calls = recorded(recorder, lambda: group.all_gather_into_tensor(large, small), s=small, l=large)
    assert calls == [("allGather", "s", "l", 4, U8, STREAM)]
    recorder.calls.clear()
    output, source = torch.ones(4), torch.ones(12)
    calls = recorded(recorder, lambda: group.reduce_scatter_tensor(output, source, ReduceOp.AVG), o=output, i=source)
    assert calls == [("reduceScatter", "i", "o", 4, F32, AVG, STREAM)]
    recorder.calls.clear()
    calls = recorded(recorder, lambda: group.reduce_scatter(output, list(source.view(3, 4))))
    assert [call[2:] for call in calls] == [("o", 4, F32, SUM, STREAM)]
    recorder.calls.clear()
    calls = recorded(recorder, lambda: group.all_gather(list(torch.ones(3, 4)), output))
    assert [(call[0], call[1], *call[3:]) for call in calls] == [("allGather", "o", 4, F32, STREAM)]


def test_all_to_all(recorder: Recorder, group: NcclGroup) -> None:
    output, source = torch.ones(6), torch.ones(6, dtype=torch.float32)
    calls = recorded(recorder, lambda: group.all_to_all_single(output, source, [3, 1, 2], [0, 1, 5]), o=output, i=source)
    base, start = output.data_ptr(), source.data_ptr()
    assert calls == [
        ("groupStart",),
        ("send", start + 4, 5, F32, 2, STREAM),
        ("recv", recorder.names.get(base + 16), 2, F32, 2, STREAM),
        # Nothing goes to rank 0, so nothing is sent.
        ("recv", "o", 3, F32, 0, STREAM),
        ("groupEnd",),
    ]


def test_barrier_and_nothing(recorder: Recorder, group: NcclGroup) -> None:
    assert [call[3:] for call in recorded(recorder, group.barrier)] == [(1, U8, SUM, STREAM)]
    recorder.calls.clear()
    assert recorded(recorder, lambda: group.all_reduce(torch.ones(0))) == []


def test_each_direction_has_a_communicator_and_a_stream(recorder: Recorder, group: NcclGroup) -> None:
    t = torch.ones(3)
    works = [group.send(t, 2, async_op=True), group.recv(torch.ones(3), 2, async_op=True), group.send(t, 0, async_op=True)]
    for work in works:
        work.wait()
    calls = [call for call in recorder.calls if call[0] != "init"]
    connecting, transfers = [call for call in calls if call[3] == U8], [call for call in calls if call[3] == F32]
    assert sorted((call[0], call[4]) for call in transfers) == [("recv", 0), ("send", 1), ("send", 1)]
    assert len({call[5] for call in transfers}) == 3
    # Before them a byte goes each way between two ranks, the lower one's first.
    assert sorted((call[0], call[2]) for call in connecting) == [("recv", 1), ("recv", 1), ("send", 1), ("send", 1)]
    assert {call[5] for call in transfers} < {call[5] for call in connecting}
    # Rank 1 is the sender (0 of 2) or the receiver (1 of 2) of each.
    assert sorted(call[3] for call in recorder.calls if call[0] == "init") == [0, 0, 1, 1]


def test_coalesced(recorder: Recorder, group: NcclGroup) -> None:
    first, second = torch.ones(4), torch.ones(4, dtype=torch.bfloat16)

    def several() -> None:
        with group.coalescing():
            works = [group.all_reduce(first, async_op=True), group.broadcast(second, 0, async_op=True)]
        assert works[0] is works[1]
        works[0].wait()
        assert works[0].result() == [first, second]

    assert recorded(recorder, several, f=first, s=second) == [
        ("groupStart",),
        ("allReduce", "f", "f", 4, F32, SUM, STREAM),
        ("broadcast", "s", "s", 4, BF16, 0, STREAM),
        ("groupEnd",),
    ]
