"""Our stores in torch's hands: through C++, without a Python reference, under Gloo."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import InvalidArgumentError, StoreError, StoreTimeout
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.stores import AsTorchStore, FromTorchStore, InMemoryStore, TCPStore, TCPStoreServer, new_secret
from syncline.collectives.stores.torch_store import waits_end_with


def test_it_outlives_its_last_python_reference() -> None:
    held_by_torch = dist.PrefixStore("part", AsTorchStore(InMemoryStore()))
    gc.collect()
    held_by_torch.set("key", "1")
    assert held_by_torch.get("key") == b"1"


def test_release_lets_it_go() -> None:
    count = len(AsTorchStore._alive)
    store = AsTorchStore(InMemoryStore())
    assert len(AsTorchStore._alive) == count + 1
    store.release()
    assert len(AsTorchStore._alive) == count


@pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="this torch clones no stores")
def test_a_clone_made_by_torch_sees_the_same_keys() -> None:
    part = dist.PrefixStore("part", AsTorchStore(InMemoryStore()))
    part.set("key", "1")
    clone = part.clone()
    gc.collect()
    assert clone.get("key") == b"1"
    clone.set("other", "2")
    assert part.get("other") == b"2"


def test_torchs_own_limit_is_honoured_wherever_it_was_set() -> None:
    ours = InMemoryStore(timeout=3600)
    store = AsTorchStore(ours)
    assert store.timeout == timedelta(seconds=3600)
    part = dist.PrefixStore("part", store)
    part.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError, match=r"'part/never' within 0\.05 s"):
        part.get("never")
    with pytest.raises(dist.DistStoreError, match="'part/never'"):
        part.wait(["never"])
    with pytest.raises(dist.DistStoreError, match=r"within 0\.02 s"):
        part.wait(["never"], timedelta(milliseconds=20))
    assert ours.timeout == timedelta(seconds=3600)


@pytest.mark.parametrize("call", [lambda store: store.get("never"), lambda store: store.wait(["never"])])
def test_a_wait_of_c_code_ends_when_the_scope_of_its_thread_is_cancelled(call: Callable[[dist.Store], object]) -> None:
    waits, scope = threading.Event(), CancelScope(60)

    class Watched(InMemoryStore):
        def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
            waits.set()
            return super().get(key, timeout)

        def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
            waits.set()
            super().wait(keys, timeout)

    def wait() -> object:
        with waits_end_with(scope):
            return call(dist.PrefixStore("part", AsTorchStore(Watched())))

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        assert waits.wait(30)
        scope.cancel(StoreError("rank 1 is lost"))
        with pytest.raises(StoreError, match="nobody waits for 'part/never' any more"):
            waiting.result(30)


def test_inside_a_scope_a_wait_gets_what_comes_and_has_its_own_limit() -> None:
    ours = InMemoryStore()
    part = dist.PrefixStore("part", AsTorchStore(ours))
    with waits_end_with(CancelScope(60)), ThreadPoolExecutor(1) as threads:
        with pytest.raises(dist.DistStoreError, match=r"'part/late' within 0\.02 s"):
            part.wait(["late"], timedelta(milliseconds=20))
        threads.submit(ours.set, "part/late", "1")
        assert part.get("late") == b"1"


def test_what_one_handle_of_a_tcp_store_has_set_is_seen_by_the_next_call_of_another() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    one, other = (
        FromTorchStore(dist.TCPStore("127.0.0.1", server.port, None, is_master=False, wait_for_workers=False)) for _ in range(2)
    )
    for number in range(5000):
        one.set("count", str(number))
        assert other.add("count", 0) == number


def test_a_missing_key_is_an_error_of_torchs_and_of_ours() -> None:
    store = AsTorchStore(InMemoryStore(timeout=0.02))
    for kind in (StoreTimeout, dist.DistStoreError, TimeoutError):
        with pytest.raises(kind):
            store.get("never")


def test_a_limit_of_zero_is_none_to_torch() -> None:
    store = AsTorchStore(InMemoryStore())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["late"], timedelta(0))
        with pytest.raises(StoreTimeout):
            store.wait(["never"], timedelta(seconds=0.05))
        assert not waiting.done()
        store.set("late", "1")
        waiting.result(60)


def test_torch_does_not_ask_for_what_there_is_not() -> None:
    store = AsTorchStore(InMemoryStore())
    for handle in (store, dist.PrefixStore("part", store)):
        assert handle.has_extended_api() is False


def all_reduce_over(stores: list[dist.Store]) -> list[list[float]]:
    size = len(stores)

    def run(rank: int) -> list[float]:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", stores[rank]), rank, size, timedelta(seconds=60))
        tensor = torch.tensor([rank + 1.0, 100.0 * rank])
        gloo.allreduce([tensor]).wait()
        return tensor.tolist()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gloo_meets_in_memory(size: int) -> None:
    ours = InMemoryStore()
    expected = [size * (size + 1) / 2, 100.0 * size * (size - 1) / 2]
    assert all_reduce_over([AsTorchStore(ours) for _ in range(size)]) == [expected] * size


def test_gloo_meets_over_tcp() -> None:
    secret = new_secret()
    with TCPStoreServer(secret=secret) as server:
        stores = [TCPStore(server.host, server.port, secret=secret) for _ in range(3)]
        assert all_reduce_over([AsTorchStore(store) for store in stores]) == [[6.0, 300.0]] * 3
        for store in stores:
            store.close()


def test_gloo_names_the_rank_that_never_came() -> None:
    """The error of our store comes out of torch's C++ code in one piece."""
    with pytest.raises(StoreTimeout, match="nobody set 'gloo/"):
        dist.ProcessGroupGloo(dist.PrefixStore("gloo", AsTorchStore(InMemoryStore())), 0, 2, timedelta(seconds=0.2))


def test_init_process_group_takes_it_and_opens_no_port_for_it() -> None:
    dist.init_process_group("gloo", store=AsTorchStore(InMemoryStore()), rank=0, world_size=1)
    gc.collect()
    try:
        tensor = torch.tensor([3.0])
        dist.all_reduce(tensor)
        assert tensor.item() == 3.0
        assert dist.get_world_size(dist.new_group([0])) == 1
    finally:
        dist.destroy_process_group()


def test_errors_of_torchs_stores_are_ours() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    client = FromTorchStore(dist.TCPStore("127.0.0.1", server.port, None, is_master=False, wait_for_workers=False))
    assert client.describe() == f"torch.distributed.TCPStore at 127.0.0.1:{server.port}"
    client.set("key", "1")
    del server
    gc.collect()
    for call in (lambda: client.get("key"), lambda: client.set("key", "2"), lambda: client.wait(["key"]), client.num_keys):
        with pytest.raises(StoreError, match=r"TCPStore at 127.0.0.1:\d+ failed"):
            call()


def test_adding_to_text_names_the_key() -> None:
    store = FromTorchStore(dist.HashStore())
    store.set("text", "abc")
    with pytest.raises(InvalidArgumentError, match=r"torch.distributed.HashStore: add\('text', 1\)"):
        store.add("text", 1)


@pytest.mark.parametrize("value", ["abc", str(2**63 - 1)])
def test_a_wrong_add_to_a_store_of_ours_behind_torch_is_an_error_of_the_caller(value: str) -> None:
    for torchs in (AsTorchStore(InMemoryStore()), dist.PrefixStore("of a job", AsTorchStore(InMemoryStore()))):
        store = FromTorchStore(torchs)
        store.set("key", value)
        with pytest.raises(InvalidArgumentError, match="key"):
            store.add("key", 1)


def test_who_waits_in_a_hash_store_is_woken_by_add() -> None:
    """torch's own wait sleeps on until its deadline."""
    torchs = dist.HashStore()
    store = FromTorchStore(torchs, timeout=3600)
    woken = threading.Event()
    waiter = threading.Thread(target=lambda: (store.wait(["count"]), woken.set()), daemon=True)
    waiter.start()
    with pytest.raises(StoreTimeout):
        store.wait(["never"], 0.1)
    torchs.add("count", 1)
    assert woken.wait(60)
    waiter.join()


def test_limits_of_the_two_handles_are_their_own() -> None:
    torchs = dist.HashStore()
    torchs.set_timeout(timedelta(seconds=7))
    store = FromTorchStore(torchs)
    assert store.timeout == timedelta(seconds=7)
    store.set_timeout(3)
    assert torchs.timeout == timedelta(seconds=7)
