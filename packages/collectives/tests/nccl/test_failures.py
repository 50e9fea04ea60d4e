"""What is refused, and how a group ends: each error by its name, on every thread that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import (
    BackendUnavailableError,
    CollectiveTimeout,
    DisagreementError,
    GroupClosedError,
    InvalidArgumentError,
    RankLostError,
    TransportError,
)
from syncline.collectives.engine.call import Signature
from syncline.collectives.engine.device import Event
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.startup.backend import ConnectRequest
from syncline.collectives.startup.registry import load_backend
from syncline.collectives.transports.nccl import library
from syncline.collectives.transports.nccl.connections import Connector, find_conflict, peer_info
from syncline.collectives.transports.nccl.group import NcclGroup
from syncline.collectives.transports.nccl.rendezvous import StoreRendezvous
from test_support.fake_device import FakeDevice, FakeEvent, FakeStream
from test_support.fake_nccl import FakeNccl, NcclError
from test_support.fake_nccl_group import NcclGroupOnFakes, run_on_fakes

# ---- what is missing ----


class Fake:
    """An object with these attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def cupy_for(cuda_version: int, version: str = "14.2.0") -> Fake:
    return Fake(__version__=version, cuda=Fake(runtime=Fake(runtimeGetVersion=lambda: cuda_version)))


GOOD_NCCL = Fake(available=True, NcclCommunicator=object)


@pytest.mark.parametrize(
    ("cupy", "nccl", "words"),
    [
        (
            cupy_for(12_090),
            GOOD_NCCL,
            ["is for CUDA 12, but torch", "is for CUDA 13", "pip install cupy-cuda13x nvidia-nccl-cu13"],
        ),
        (cupy_for(13_020), Fake(available=False), ["finds no NCCL library", "pip install nvidia-nccl-cu13"]),
        (cupy_for(13_000, "13.6.0"), GOOD_NCCL, ["CuPy 13.6.0 is too old", "expected 14 or newer", "--upgrade"]),
    ],
)
def test_cupys_that_do_not_fit(cupy: Any, nccl: Any, words: list[str]) -> None:
    sentence = library._mismatch(cupy, nccl, 13)
    assert sentence is not None
    assert all(word in sentence for word in words)
    assert library._mismatch(cupy_for(13_020), GOOD_NCCL, 13) is None


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    library.cupy_problem.cache_clear()
    assert library.cupy_problem(12) == ("CuPy is not installed; `pip install cupy-cuda12x nvidia-nccl-cu12` brings it and NCCL")
    library.cupy_problem.cache_clear()


@pytest.mark.parametrize(
    ("cuda", "available", "words"),
    [(None, False, "this torch is built without CUDA"), ("13.0", False, "torch sees no CUDA device")],
)
def test_no_gpu(monkeypatch: pytest.MonkeyPatch, cuda: str | None, available: bool, words: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    backend = load_backend("nccl")
    assert words in str(backend.missing())
    with pytest.raises(BackendUnavailableError, match=f"backend 'nccl': {words}"):
        backend.connect(ConnectRequest(None, None, None, None, 5.0))


# ---- what is refused ----


def peers_of(*gpus: tuple[str, str, str]) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "host": host,
            "hostname": host,
            "host_id": host_id,
            "pci_id": pci_id,
            "shares": False,
            "visible": "0",
            "version": "2.27.7",
        }
        for rank, (host, host_id, pci_id) in enumerate(gpus)
    ]


def test_two_ranks_on_one_gpu() -> None:
    assert find_conflict(peers_of(("a", "", "17"), ("a", "", "18"), ("b", "", "17"))) is None
    assert find_conflict(peers_of(("a", "x", "17"), ("a", "y", "17"))) is None  # the testing aid
    found = find_conflict(peers_of(("a", "", "16"), ("a", "", "0000:17:00.0"), ("a", "", "0000:17:00.0")))
    assert found is not None
    for words in ("ranks 1 and 2", "GPU 0000:17:00.0 of a", "CUDA_VISIBLE_DEVICES", "0 on rank 1", "torch.cuda.set_device"):
        assert words in found


@pytest.mark.parametrize(("version", "shares"), [("2.30.3", True), ("3.0.0", True), ("2.29.9", False)])
def test_ranks_that_nccl_lets_share_a_gpu(monkeypatch: pytest.MonkeyPatch, version: str, shares: bool) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    said = [peer_info(rank, "0000:17:00.0", version) for rank in range(2)]
    assert (find_conflict(said) is None) == shares
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
    assert find_conflict([said[0], peer_info(1, "0000:17:00.0", version)]) is not None  # all ranks must say so


def test_two_versions() -> None:
    peers = peers_of(("a", "", "1"), ("b", "", "1"))
    peers[1]["version"] = "2.21.5"
    found = find_conflict(peers)
    assert found is not None
    assert "rank 0 on a has NCCL 2.27.7, rank 1 on b has NCCL 2.21.5" in found


@pytest.mark.ranks
def test_every_rank_hears_of_two_on_one_gpu() -> None:
    def body(group: NcclGroup) -> None:
        with pytest.raises(DisagreementError, match=r"ranks 0 and 2 have both chosen the GPU 0000:17:00\.0"):
            group.all_reduce(torch.ones(1))

    run_on_fakes(3, body, pci_id=lambda rank: "0000:18:00.0" if rank == 1 else "0000:17:00.0")


def test_tensors_on_two_gpus() -> None:
    group = NcclGroup(Connector(FakeNccl(), FakeDevice(), StoreRendezvous(dist.HashStore()), [0], 0, "g"), timeout_s=5)
    with pytest.raises(InvalidArgumentError, match="moves tensors on cuda, found a tensor on cpu"):
        group.all_reduce(torch.ones(2))
    signature = Signature("all_gather", dtype=torch.float32, shape=(2,))
    pair = [Fake(device=torch.device("cuda", index)) for index in range(2)]
    with pytest.raises(InvalidArgumentError, match="expected all tensors on one GPU, found cuda:0 and cuda:1"):
        group._device_of(signature, pair)  # type: ignore[arg-type]
    connections = group._connections
    connections._device = torch.device("cuda", 0)
    for connected in (connections.link_of_all_ranks, partial(connections.with_peer, 1)):
        with pytest.raises(InvalidArgumentError, match=r"the group serves cuda:0, the GPU of its first call, found .* cuda:1"):
            connected(signature, torch.device("cuda", 1))


# ---- how a group ends ----


@pytest.mark.ranks
def test_a_peer_that_never_comes() -> None:
    """The deadline names the collective; the error reaches every waiting thread, and every later call."""

    def body(group: NcclGroup) -> None:
        group.barrier()
        group.set_timeout(1)
        if group.rank == 1:
            return
        work = group.all_reduce(torch.ones(3), async_op=True)
        heard: list[BaseException] = []

        def wait() -> None:
            try:
                work.wait(30)
            except BaseException as error:  # noqa: BLE001 - looked at below
                heard.append(error)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(heard) == 3
        failure = work.exception()
        assert isinstance(failure, CollectiveTimeout)
        assert "all_reduce(float32[3], op=SUM), number 1 on rank 0 of 2" in str(failure)
        assert work.is_completed()
        with pytest.raises(CollectiveTimeout, match="did not finish within 1 s"):
            work.wait()
        with pytest.raises(Exception, match="did not finish within 1 s"):
            work.get_future().wait()
        with pytest.raises(TransportError, match="was not started because the group had failed before:\n  all_reduce"):
            group.broadcast(torch.ones(1))

    run_on_fakes(2, body)


def raw_communicator(group: NcclGroup) -> Any:
    """The fake of that of all ranks."""
    return group._connections._made[0].communicator._raw


@pytest.mark.ranks
def test_a_peer_that_dies() -> None:
    """NCCL reports it of the communicator."""

    def body(group: NcclGroup) -> None:
        group.barrier()
        if group.rank == 1:
            return
        work = group.all_reduce(torch.ones(3), async_op=True)
        raw_communicator(group).break_down(NcclError(6, "remote process exited or there was a network error"))
        with pytest.raises(TransportError, match=r"remote process exited.*A rank of the group died.*rank 0 of 2.*all_reduce"):
            work.wait(20)

    run_on_fakes(2, body)


@pytest.mark.ranks
def test_a_rank_hears_that_another_has_failed() -> None:
    """Within a node NCCL may say nothing of it, and the time limit is long."""

    def body(group: NcclGroup) -> None:
        group.barrier()
        if group.rank == 1:
            raw_communicator(group).abort = lambda: None
            group.abort()
            return
        words = "all_reduce.* will not finish, because another rank does not come: rank 1 of 2 .* failed: the group was aborted"
        with pytest.raises(TransportError, match=words):
            group.all_reduce(torch.ones(3), async_op=True).wait(25)

    run_on_fakes(2, body)


@pytest.mark.ranks
@pytest.mark.parametrize("lost", [1, 2])
def test_a_rank_hears_from_the_host_group_that_another_is_lost(monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    """Only the ranks of the group count."""
    error = RankLostError(f"the process of rank {lost} has ended", [lost])
    is_lost = threading.Event()
    monkeypatch.setattr(HostGroup, "reason_to_give_up", lambda _: error if is_lost.is_set() else None)

    def body(group: NcclGroup) -> None:
        part = group.subset([0, 1], "part") if group.rank < 2 else None
        if part is None:
            return
        part.barrier()
        both.wait(25)
        part.set_timeout(3.0)
        is_lost.set()
        if group.rank == 0:
            words = "does not come: the process of rank 1 has ended" if lost == 1 else "did not finish within 3 s"
            with pytest.raises(TransportError, match=words):
                part.all_reduce(torch.ones(3), async_op=True).wait(25)
        both.wait(25)
        part.abort()

    both = threading.Barrier(2)
    run_on_fakes(3, body, over_host_group=True)


@pytest.mark.ranks
def test_abort_wakes_who_waits() -> None:
    def body(group: NcclGroup) -> None:
        group.barrier()
        if group.rank == 1:
            return
        work = group.all_reduce(torch.ones(3), async_op=True)
        threading.Thread(target=group.abort).start()
        with pytest.raises(TransportError, match="the group was aborted on rank 0 of 2"):
            work.wait(20)
        with pytest.raises(GroupClosedError):
            group.barrier()

    run_on_fakes(2, body)


@pytest.mark.ranks
def test_a_rank_that_does_not_connect_is_named() -> None:
    def body(group: NcclGroup) -> None:
        if group.rank == 0:
            with pytest.raises(TransportError, match=r"rank 1 did not come to 'ranks/all' within 0\.5 s"):
                group.all_reduce(torch.ones(1))

    run_on_fakes(2, body, timeout_s=0.5)


@pytest.mark.ranks
@pytest.mark.parametrize("over_host_group", [False, True])
def test_all_hear_why_the_first_rank_cannot_decide(over_host_group: bool) -> None:
    """And a rank that tries again is told that the group has failed: its topic is used up."""

    def no_id() -> bytes:
        raise NcclError(2, "unhandled system error")

    def body(group: NcclGroup) -> None:
        group._connector.nccl.get_unique_id = no_id
        words = "NCCL reported from ncclGetUniqueId: unhandled system error"
        with pytest.raises(TransportError, match=words if group.rank == 0 else f"rank 0 came to .* but failed there: {words}"):
            group.all_reduce(torch.ones(1))
        with pytest.raises(TransportError, match=f"was not started because the group had failed before:\n  .*{words}"):
            group.all_reduce(torch.ones(1))

    run_on_fakes(2, body, over_host_group=over_host_group)


@pytest.mark.ranks
def test_a_split_that_does_not_come_ends_the_group() -> None:
    """A thread is left inside ncclCommSplit, so the communicator cannot be used."""

    def body(group: NcclGroup) -> None:
        group.barrier()
        group.set_timeout(0.3)
        never = threading.Event()
        raw_communicator(group).commSplit = lambda color, key: never.wait(5)
        with pytest.raises(CollectiveTimeout, match=r"NCCL did not connect the ranks .* within 0\.3 s"):
            group.split(0)
        with pytest.raises(TransportError, match="had failed before:\n  NCCL did not connect"):
            group.all_reduce(torch.ones(1))
        never.set()

    run_on_fakes(1, body)  # two ranks would have to agree on the split within the time limit


@pytest.mark.ranks
def test_a_transfer_whose_peer_never_comes() -> None:
    def body(group: NcclGroup) -> None:
        if group.rank == 0:
            work = group.recv(torch.ones(1), 1, async_op=True)
            # The connection and the transfer have the same time, and either may be the first to say so.
            words = r"rank 1 did not come to 'ranks/0 to 1'|recv\(float32\[1\], src=1, tag=0\).* did not finish within 0\.5 s"
            with pytest.raises(TransportError, match=words):
                work.wait(20)

    run_on_fakes(2, body, timeout_s=0.5)


class FailingStream(FakeStream):
    """What is issued fails, as where memory for a copy is lacking."""

    def run(self, body: Callable[[], None], after: Event) -> FakeEvent:
        raise torch.OutOfMemoryError("out of memory")


class FailingDevice(FakeDevice):
    stream_class = FailingStream


def test_what_cannot_be_issued_ends_the_group() -> None:
    """The other ranks have issued it, so nothing after it would match."""
    connector = Connector(FakeNccl(), FailingDevice(), StoreRendezvous(dist.HashStore()), [0], 0, "g")
    group = NcclGroupOnFakes(connector, timeout_s=5)
    with pytest.raises(torch.OutOfMemoryError):
        group.all_reduce(torch.ones(1))
    with pytest.raises(TransportError, match="had failed before:\n  out of memory"):
        group.all_reduce(torch.ones(1))
    group.close()
