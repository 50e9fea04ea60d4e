"""The public checks on every store there is, ours and torch's, and each seen through the other's interface."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from syncline.collectives import InvalidArgumentError
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.stores import (
    AsTorchStore,
    FileStore,
    FromTorchStore,
    InMemoryStore,
    PrefixStore,
    Store,
    TCPStore,
    TCPStoreServer,
    new_secret,
)
from syncline.collectives.stores.over_group import GroupStore
from syncline.collectives.testing.store_conformance import STORE_CHECKS, OpenStore, StoreCheck
from syncline.collectives.transports.threads import InProcessTransport, SharedState

Maker = Callable[[Path], contextlib.AbstractContextManager[OpenStore]]


@contextlib.contextmanager
def in_memory(folder: Path) -> Iterator[OpenStore]:
    store = InMemoryStore()
    yield lambda: store


@contextlib.contextmanager
def file(folder: Path) -> Iterator[OpenStore]:
    yield lambda: FileStore(folder, "run")


@contextlib.contextmanager
def tcp(folder: Path) -> Iterator[OpenStore]:
    secret = new_secret()
    with TCPStoreServer(secret=secret) as server, contextlib.ExitStack() as stack:

        def open_store() -> Store:
            store = TCPStore(server.host, server.port, secret=secret)
            stack.callback(store.close)
            return store

        yield open_store


@contextlib.contextmanager
def over_group(folder: Path) -> Iterator[OpenStore]:
    """The handles are those of rank 1 and of rank 0, which has the table, in turn."""
    shared_state = SharedState(2)
    groups = [HostGroup(InProcessTransport(shared_state, rank), rank, 2, timeout_s=60) for rank in range(2)]
    stores = [GroupStore(group) for group in groups]
    turns = itertools.cycle(reversed(stores))
    yield lambda: next(turns).clone()
    for store in reversed(stores):  # rank 0 waits for rank 1
        store.close()


@contextlib.contextmanager
def prefixed(folder: Path) -> Iterator[OpenStore]:
    store = InMemoryStore()
    store.set("key", "of another part")
    store.set("other/key", "of another part")
    yield lambda: PrefixStore("part", store)


@contextlib.contextmanager
def torch_hash(folder: Path) -> Iterator[OpenStore]:
    store = dist.HashStore()
    yield lambda: FromTorchStore(store)


@contextlib.contextmanager
def torch_file(folder: Path) -> Iterator[OpenStore]:
    store = dist.FileStore(str(folder / "file"), -1)
    yield lambda: FromTorchStore(store)


@contextlib.contextmanager
def torch_tcp(folder: Path) -> Iterator[OpenStore]:
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    yield lambda: FromTorchStore(dist.TCPStore("127.0.0.1", server.port, None, is_master=False, wait_for_workers=False))


@contextlib.contextmanager
def torch_prefix(folder: Path) -> Iterator[OpenStore]:
    store = dist.HashStore()
    yield lambda: FromTorchStore(dist.PrefixStore("part", store))


def there_and_back(make: Maker) -> Maker:
    @contextlib.contextmanager
    def both_ways(folder: Path) -> Iterator[OpenStore]:
        with make(folder) as open_store, contextlib.ExitStack() as stack:

            def open_back() -> Store:
                there = AsTorchStore(open_store())
                stack.callback(there.release)
                return FromTorchStore(there)

            yield open_back

    both_ways.__name__ = f"{make.__name__}_there_and_back"
    return both_ways


def through_torch_prefix(make: Maker) -> Maker:
    """Calls that come out of torch's C++ code."""

    @contextlib.contextmanager
    def prefixed_in_torch(folder: Path) -> Iterator[OpenStore]:
        with make(folder) as open_store, contextlib.ExitStack() as stack:

            def open_back() -> Store:
                there = AsTorchStore(open_store())
                stack.callback(there.release)
                return FromTorchStore(dist.PrefixStore("part", there))

            yield open_back

    prefixed_in_torch.__name__ = f"{make.__name__}_through_torch_prefix"
    return prefixed_in_torch


OURS = [in_memory, file, tcp, over_group, prefixed]
MAKERS = [
    *OURS,
    torch_hash,
    torch_file,
    torch_tcp,
    torch_prefix,
    *(there_and_back(make) for make in (in_memory, file, tcp)),
    *(through_torch_prefix(make) for make in (in_memory, file, tcp)),
]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_store(make: Maker, check: StoreCheck, tmp_path: Path) -> None:
    with make(tmp_path) as open_store:
        check(open_store)


@pytest.mark.parametrize("text", ["1_0", " 5", "5 ", "+5", "--5", "-", "", "1.0", "0x1", "5\n"])
@pytest.mark.parametrize("make", [in_memory, file, tcp])
def test_only_digits_are_a_number(make: Maker, text: str, tmp_path: Path) -> None:
    with make(tmp_path) as open_store:
        store = open_store()
        store.set("count", text)
        with pytest.raises(InvalidArgumentError, match="expected a decimal number as value"):
            store.add("count", 1)
        assert store.get("count") == text.encode()
