"""Stores between real processes."""

from __future__ import annotations

import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from syncline.collectives.errors import StoreError, StoreTimeout
from syncline.collectives.stores import FileStore, InMemoryStore, Store, TCPStore, TCPStoreServer, new_secret
from test_support.forked import in_fork
from test_support.jobs import LIMIT_S

PROCESSES = 3

SHARING = """
import os, sys, warnings
warnings.simplefilter("error", ResourceWarning)
from syncline.collectives.errors import StoreError, StoreTimeout
from syncline.collectives.stores import FileStore, TCPStore
rank, size = map(int, sys.argv[1:3])
over_tcp = TCPStore("127.0.0.1", int(sys.argv[3]), secret=os.environ["THE_SECRET"])
for store in (FileStore(sys.argv[4], "run"), over_tcp):
    store.wait(["go"], 60)
    sums = [store.add("count", 1) for _ in range(20)]
    store.set(f"sums/{rank}", " ".join(map(str, sums)))
    store.wait([f"sums/{other}" for other in range(size)], 60)
    assert store.compare_set("winner", "", str(rank)) == store.get("winner")
over_tcp.close()
"""

MEETING = """
import sys, warnings, torch, torch.distributed as dist
warnings.simplefilter("error", ResourceWarning)
from syncline.collectives.stores import AsTorchStore, file_rendezvous
rank, size = map(int, sys.argv[1:3])

for run in ("first", "second"):
    store = file_rendezvous(sys.argv[3], rank, size, timeout=100)
    store.set(f"seen/{rank}", store.get("run") if rank else "nothing")
    if rank == 0:
        assert not store.check(["run"]), "an earlier run shows through"
        store.set("run", run)
    store.wait([f"seen/{other}" for other in range(size)])
    print(store.get("run").decode(), store.describe())

dist.init_process_group("gloo", store=AsTorchStore(store), rank=rank, world_size=size)
tensor = torch.tensor([rank + 1.0, 10.0 * rank])
dist.all_reduce(tensor)
half = dist.new_group(ranks=[0, 1])
if rank < 2:
    dist.barrier(half)
dist.monitored_barrier()
dist.destroy_process_group()
print(tensor.tolist())
"""


def start(python: list[str], script: str, *arguments: object, env: dict[str, str] | None = None) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [*python, "-c", script, str(rank), str(PROCESSES), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        for rank in range(PROCESSES)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, error
    return [output.strip() for output, _ in outputs]


def the_sums(store: Store) -> list[int]:
    return sorted(int(one) for rank in range(PROCESSES) for one in store.get(f"sums/{rank}").split())


def test_processes_share_a_store(python: list[str], tmp_path: Path) -> None:
    secret = new_secret()
    with TCPStoreServer(secret=secret) as server:
        processes = start(python, SHARING, server.port, tmp_path, env={"THE_SECRET": secret})
        over_tcp, over_file = TCPStore(server.host, server.port, secret=secret), FileStore(tmp_path, "run")
        for store in (over_file, over_tcp):
            store.set("go", "1")
        finish(processes)
        for store in (over_file, over_tcp):
            assert the_sums(store) == list(range(1, PROCESSES * 20 + 1))
        over_tcp.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["log"], "locks or tickets were left"


def test_runs_that_meet_in_one_folder_never_see_each_other_and_torch_can_start_there(python: list[str], tmp_path: Path) -> None:
    said = finish(start(python, MEETING, tmp_path))
    # Torch 2.8 has its Gloo print.
    outputs = [[line for line in output.splitlines() if not line.startswith("[Gloo]")] for output in said]
    assert outputs == [outputs[0]] * PROCESSES, "ranks of one run are in different stores"
    first, second, sums = outputs[0]
    assert first.startswith("first file store")
    assert second.startswith("second file store")
    assert first.split()[-1] != second.split()[-1]
    assert sums == str([PROCESSES * (PROCESSES + 1) / 2, 10.0 * PROCESSES * (PROCESSES - 1) / 2])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on: fork with threads
def test_a_forked_child_does_not_use_its_parents_connection() -> None:
    secret = new_secret()
    with TCPStoreServer(secret=secret) as server:
        store = TCPStore(server.host, server.port, secret=secret)
        store.set("of", "parent")
        child = os.fork()
        if child == 0:
            os._exit(0 if [store.add("count", 1) for _ in range(50)][-1] >= 50 else 1)
        for _ in range(50):
            assert store.get("of") == b"parent"
            store.add("count", 1)
        assert os.waitpid(child, 0)[1] == 0
        assert store.get("count") == b"100"
        store.close()


SERVING = """
import sys
from syncline.collectives.stores import TCPStoreServer
server = TCPStoreServer(secret=sys.argv[1])
print(server.port, flush=True)
sys.stdin.read()
"""


def test_who_waits_for_a_server_that_is_killed_is_told_at_once(python: list[str]) -> None:
    secret = new_secret()
    command = [*python, "-c", SERVING, secret]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        store = TCPStore("127.0.0.1", int(process.stdout.readline()), secret=secret, timeout=3600)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "never")
            with pytest.raises(StoreTimeout):
                store.get("never either", 0.05)
            process.kill()
            with pytest.raises(StoreError, match="has the process that serves it ended"):
                waiting.result(60)
        with pytest.raises(StoreError, match="has the process that serves it ended"):
            store.set("key", "1")
        store.close()


LEAVING = """
import threading
from syncline.collectives.stores import TCPStore, TCPStoreServer, new_secret
secret = new_secret()
server = TCPStoreServer(secret=secret)
store = TCPStore(server.host, server.port, secret=secret)
store.set("key", "1")
threading.Thread(target=store.get, args=("never", 3600), daemon=True).start()
"""


def test_a_process_that_closes_nothing_can_end(python: list[str]) -> None:
    done = subprocess.run([*python, "-c", LEAVING], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")


FORKING = """
import gc, os, warnings
warnings.simplefilter("error", ResourceWarning)
warnings.simplefilter("ignore", DeprecationWarning)
from syncline.collectives.stores import TCPStore, TCPStoreServer, new_secret
secret = new_secret()
server = TCPStoreServer(secret=secret)
store, other = (TCPStore(server.host, server.port, secret=secret) for _ in range(2))
child = os.fork()
if child == 0:
    other.close()
    del other
    gc.collect()
    server.close()
    assert store.add("count", 1) >= 1
    store.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert store.add("count", 1) == 2
assert other.add("count", 1) == 3
for one in (store, other, server):
    one.close()
"""


def test_what_a_forked_child_closes_stays_open_in_its_parent(python: list[str]) -> None:
    done = subprocess.run([*python, "-c", FORKING], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on: fork with threads
@pytest.mark.parametrize("kind", ["file", "TCP", "memory"])
def test_a_forked_child_does_not_wait_for_a_lock_of_its_parents_thread(kind: str, tmp_path: Path) -> None:
    def hold() -> None:
        if isinstance(store, FileStore):
            lock: AbstractContextManager[object] = store._log.lock
        else:
            lock = store._lock if isinstance(store, TCPStore) else store._table.changed
        with lock:
            held.set()
            assert may_end.wait(60)

    def in_child() -> list[bytes]:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(clone.get, "from the child", 10)
            store.set("from the child", b"new")
            return [waiting.result(), store.get("key", 10)]

    secret = new_secret()
    with TCPStoreServer(secret=secret) as server:
        store: FileStore | TCPStore | InMemoryStore
        if kind == "file":
            store = FileStore(tmp_path, "run")
        else:
            store = InMemoryStore() if kind == "memory" else TCPStore(server.host, server.port, secret=secret)
        clone = store.clone()
        store.set("key", b"value")
        held, may_end = threading.Event(), threading.Event()
        with ThreadPoolExecutor(1) as pool:
            holding = pool.submit(hold)
            assert held.wait(60)
            try:
                assert in_fork(in_child) == [b"new", b"value"]
            finally:
                may_end.set()
            holding.result()
        for one in (store, clone):
            one.close()
