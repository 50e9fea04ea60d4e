"""Where ranks meet that no library connects: URLs, secrets, and that they do meet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from syncline.collectives import (
    InvalidArgumentError,
    LaunchError,
    ProcessGroup,
    StoreAuthenticationError,
    StoreTimeout,
    StoreUnavailableError,
)
from syncline.collectives.startup import rendezvous
from syncline.collectives.startup.rendezvous import (
    Address,
    address_by_environment,
    find_secret,
    keys_of_connection,
    loopback_host,
    parse_address,
    parse_folder,
    store_at,
    tcp_store_of_rank_0,
)
from syncline.collectives.startup.user_secret import is_loopback, user_secret
from syncline.collectives.stores import TCPStoreServer, new_secret
from syncline.collectives.testing import run_ranks
from syncline.collectives.testing.processes import run_processes
from test_support.forked import in_fork
from test_support.full_run import cases
from test_support.jobs import LIMIT_S

SPAWNING_JOB = Path(__file__).with_name("spawning_job.py")
JOB = Path(__file__).with_name("rendezvous_job.py")
BY_HAND = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- one store for several connections ----


def test_each_connection_in_a_store_has_keys_of_its_own() -> None:
    store = dist.HashStore()
    for number in range(2):
        first, second = (keys_of_connection(store, "gloo", rank) for rank in range(2))
        first.set("address", f"of connection {number}")
        assert second.get("address") == f"of connection {number}".encode()
        newcomer = keys_of_connection(store, "gloo", None)
        assert newcomer.get("address") == f"of connection {number}".encode()


def test_a_newcomer_that_comes_first_meets_the_first_connection() -> None:
    store = dist.HashStore()
    newcomer = keys_of_connection(store, "gloo", None)
    keys_of_connection(store, "gloo", 0).set("address", "here")
    assert newcomer.get("address") == b"here"


def test_an_attempt_of_torchrun_sees_no_keys_of_the_attempt_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only some of the ranks had connected in the attempt before."""
    store = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    keys_of_connection(store, "gloo", 0).set("address", "old")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    first, second = (keys_of_connection(store, "gloo", rank) for rank in range(2))
    assert not second.check(["address"])
    first.set("address", "new")
    assert second.get("address") == b"new"


def test_torchruns_store_after_nodes_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent keeps its store, and its count of restarts."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
    }.items():
        monkeypatch.setenv(name, value)
    keys_of_connection(store_at("env://", 0, 2, 20.0), "gloo", 0).set("address", "old")
    first, newcomer = (keys_of_connection(store_at("env://", rank, 3, 20.0), "gloo", rank) for rank in (0, 2))
    assert not newcomer.check(["address"])
    first.set("address", "new")
    assert newcomer.get("address") == b"new"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(new_secret() + "\n")
    return path


# ---- what a URL says ----


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("tcp://node7:29500", Address("node7", 29500, None)),
        ("tcp://10.0.0.7:1?secret_file=/home/a%20b/s", Address("10.0.0.7", 1, "/home/a b/s")),
        ("tcp://10.0.0.7:1?secret_file=/opt/c++/s", Address("10.0.0.7", 1, "/opt/c++/s")),
        ("tcp://[::1]:29500", Address("::1", 29500, None)),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert parse_address(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "tcp://node7",
        "tcp://:29500",
        "tcp://node7:0",
        "tcp://node7:port",
        "tcp://node7:99999",
        "tcp://node7:1/path",
        "tcp://me@x:1",
    ],
)
def test_no_address(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"such as 'tcp://host:29500'") as caught:
        parse_address(url)
    assert repr(url) in str(caught.value)


@pytest.mark.parametrize("query", ["secret=x", "rank=0&world_size=2", "secret_file=", "secret_file=/a&secret_file=/b"])
def test_a_query_that_would_be_ignored(query: str) -> None:
    with pytest.raises(InvalidArgumentError, match="nothing but secret_file=PATH"):
        parse_address(f"tcp://node7:29500?{query}")
    with pytest.raises(InvalidArgumentError, match="nothing but secret_file=PATH"):
        address_by_environment(f"env://?{query}", BY_HAND)


def test_folders() -> None:
    assert parse_folder("file:///shared/run") == Path("/shared/run")
    for url in ("file://shared/run", "file:///shared?rank=0", "file://", "file:///shared#x"):
        with pytest.raises(InvalidArgumentError, match="such as 'file:///shared/folder'"):
            parse_folder(url)


def test_the_environments_address() -> None:
    assert address_by_environment("env://", BY_HAND) == Address("127.0.0.1", 29500, None)
    assert address_by_environment("env://?secret_file=/s", BY_HAND) == Address("127.0.0.1", 29500, "/s")
    with pytest.raises(LaunchError, match="needs MASTER_ADDR and MASTER_PORT"):
        address_by_environment("env://", {})
    with pytest.raises(LaunchError, match="needs MASTER_PORT in"):
        address_by_environment("env://", {"MASTER_ADDR": "x"})
    with pytest.raises(LaunchError, match="expected MASTER_PORT to be a port, 1 to 65535, found 'http'"):
        address_by_environment("env://", {**BY_HAND, "MASTER_PORT": "http"})
    with pytest.raises(LaunchError, match="expected MASTER_PORT to be a port, 1 to 65535, found '²'"):  # `isdigit` takes it
        address_by_environment("env://", {**BY_HAND, "MASTER_PORT": "²"})
    with pytest.raises(InvalidArgumentError, match="found 'env://node7'"):
        address_by_environment("env://node7", BY_HAND)


# ---- the secret ----


def test_the_secret(secret_file: Path) -> None:
    assert find_secret(None, {"SYNCLINE_SECRET": "s"}) == "s"
    assert find_secret(str(secret_file), {}) == secret_file.read_text().strip()


def test_no_secret_is_refused_with_the_remedies() -> None:
    with pytest.raises(LaunchError, match=r"must share a secret") as caught:
        store_at("tcp://10.0.0.7:29500", 0, 2, 1.0, {})
    assert all(remedy in str(caught.value) for remedy in ("?secret_file=PATH", "SYNCLINE_SECRET", "file:///shared/folder"))
    with pytest.raises(LaunchError, match=r"must share a secret"):
        store_at("env://", 1, 2, 1.0, {**BY_HAND, "MASTER_ADDR": "node7"})


def test_two_secrets_are_one_too_many(secret_file: Path) -> None:
    with pytest.raises(LaunchError, match=f"in SYNCLINE_SECRET and one in secret_file={secret_file}") as caught:
        find_secret(str(secret_file), {"SYNCLINE_SECRET": "hush"})
    assert "hush" not in str(caught.value)


def test_a_secret_file_that_others_may_read(secret_file: Path) -> None:
    secret_file.chmod(0o640)
    with pytest.raises(LaunchError, match=rf"open to other users \(mode 640\); run `chmod 600 {secret_file}`"):
        find_secret(str(secret_file), {})


def test_no_secret_file(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot read the secret_file .*No such file"):
        find_secret(str(tmp_path / "none"), {})


def test_a_short_secret() -> None:
    with pytest.raises(InvalidArgumentError, match="at least 16 bytes, found 5"):
        store_at("tcp://127.0.0.1:29500", 0, 2, 1.0, {"SYNCLINE_SECRET": "short"})


def test_the_secret_of_a_user(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as processes:
        found = list(processes.map(lambda _: user_secret(tmp_path / "own"), range(8)))
    assert len(set(found)) == 1
    assert len(found[0]) == 64
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["secret"]
    (tmp_path / "own").chmod(0o755)
    with pytest.raises(LaunchError, match=r"open to nobody else, found owner \d+ and mode drwxr-xr-x\. .*secret_file=PATH"):
        user_secret(tmp_path / "own")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(LaunchError, match=r"expected .*link to belong to this user"):
        user_secret(tmp_path / "link")


def test_a_user_without_a_folder_for_temporary_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(LaunchError, match="set TMPDIR to a folder that this user can write") as caught:
        store_at("tcp://127.0.0.1:29500", 0, 2, 1.0, {})
    assert "No usable temporary directory found" in str(caught.value)
    assert len(str(caught.value).splitlines()[0]) <= 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("node7", False), ("10.0.0.7", False)],
)
def test_what_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected
    assert loopback_host("env://", {**BY_HAND, "MASTER_ADDR": host}) == (host if expected else None)


# ---- meeting ----


def meet_as_threads(url: str, environ: dict[str, str]) -> None:
    with ThreadPoolExecutor(2) as ranks:
        stores: list[dist.Store] = list(ranks.map(lambda rank: store_at(url, rank, 2, 20.0, environ), range(2)))
    assert not stores[1].check(["from 0"]), "what an earlier run has left"
    stores[0].set("from 0", "a")
    assert stores[1].get("from 0") == b"a"


def test_a_folder_that_another_run_has_left(tmp_path: Path) -> None:
    for _ in range(2):
        meet_as_threads(f"file://{tmp_path}/meeting", {})


LEAVING = """
import sys
from syncline.collectives import destroy_process_group, init_process_group
rank, url = int(sys.argv[1]), sys.argv[2]
for _ in range(2):
    group = init_process_group("gloo", url, rank=rank, world_size=2, timeout=60)
    group.split(0).barrier()
    destroy_process_group()
"""


def test_runs_that_ended_leave_no_folders(tmp_path: Path, python: list[str]) -> None:
    words = [[*python, "-c", LEAVING, str(rank), f"file://{tmp_path}/meeting"] for rank in range(2)]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in words]
    said = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert [path.name for path in (tmp_path / "meeting").iterdir()] == ["rendezvous"]


def test_a_folder_that_the_program_has_removed_does_not_come_back(tmp_path: Path, python: list[str]) -> None:
    program = """
        import shutil, sys
        from syncline.collectives import destroy_process_group, init_process_group
        init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=0, world_size=1)
        destroy_process_group()
        shutil.rmtree(sys.argv[1])
        """
    subprocess.run([*python, "-c", textwrap.dedent(program), str(tmp_path / "own")], check=True, timeout=LIMIT_S)
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(StoreUnavailableError, match="expected a folder"):
        store_at(f"file://{tmp_path}/taken", 0, 2, 1.0, {})


def test_an_address_and_a_secret_file(port: int, secret_file: Path) -> None:
    meet_as_threads(f"tcp://127.0.0.1:{port}?secret_file={secret_file}", {})


def test_the_environment(port: int) -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SYNCLINE_SECRET": new_secret()}
    meet_as_threads("env://", environ)


def test_another_secret(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    store_at(url, 0, 2, 5.0, {"SYNCLINE_SECRET": new_secret()})
    with pytest.raises(StoreAuthenticationError):
        store_at(url, 1, 2, 5.0, {"SYNCLINE_SECRET": new_secret()})


def test_a_port_in_use_and_a_rank_0_that_never_comes(port: int) -> None:
    environ = {"SYNCLINE_SECRET": new_secret()}
    with pytest.raises(StoreTimeout, match="no server was there within"):
        store_at(f"tcp://127.0.0.1:{port}", 1, 2, 0.3, environ)
    server = TCPStoreServer("127.0.0.1", port, secret=new_secret())
    with pytest.raises(StoreUnavailableError, match=f"port {port} of 127.0.0.1 is in use"):
        store_at(f"tcp://127.0.0.1:{port}", 0, 2, 0.3, environ)
    server.close()


NOT_HERE = "192.0.2.1"  # an address for documentation, which no machine has


def test_all_ranks_of_a_group_are_told_why_rank_0_cannot_serve_the_store() -> None:
    def body(group: ProcessGroup) -> str:
        with pytest.raises(StoreUnavailableError) as caught:
            tcp_store_of_rank_0(group, 20.0, NOT_HERE)
        return str(caught.value)

    reason = f"TCP store: {NOT_HERE} is not an address of this machine; give one that is"
    first, *others = run_ranks(3, body, timeout_s=20.0)
    assert first == reason
    assert others == [
        f"rank {rank}: rank 0 cannot use the TCP store in which the ranks meet: look at its error\nrank 0: {reason}"
        for rank in (1, 2)
    ]


def test_all_ranks_of_a_group_are_told_which_rank_lacks_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = threading.local()

    def require() -> None:
        if hasattr(lacking, "here"):
            raise StoreUnavailableError("a TCP store needs pyzmq")

    def body(group: ProcessGroup) -> str:
        if group.rank == 1:
            lacking.here = True
        with pytest.raises(StoreUnavailableError) as caught:
            tcp_store_of_rank_0(group, 20.0)
        return str(caught.value).splitlines()[0]

    monkeypatch.setattr(rendezvous, "require_pyzmq", require)
    assert run_ranks(3, body, timeout_s=20.0) == [
        "rank 0: rank 1 cannot use the TCP store in which the ranks meet: look at its error",
        "a TCP store needs pyzmq",
        "rank 2: rank 1 cannot use the TCP store in which the ranks meet: look at its error",
    ]


@pytest.fixture
def node7(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name that leads to 127.0.1.1, which other hosts do not reach. Debian's /etc/hosts does so with a host's own name."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **named: look_up("127.0.1.1" if host == "node7" else host, *more, **named)
    )
    return "node7"


def test_a_name_that_means_loopback_on_rank_0s_host_works_there_with_a_warning(
    port: int, node7: str, caplog: pytest.LogCaptureFixture
) -> None:
    meet_as_threads("env://", {"MASTER_ADDR": node7, "MASTER_PORT": str(port), "SYNCLINE_SECRET": new_secret()})
    (said,) = caplog.messages
    assert said.startswith("rank 0: the name 'node7' leads to 127.0.1.1 on host ")
    assert "give all ranks an IP address of this host" in said


def test_a_loopback_address_needs_no_warning(port: int, caplog: pytest.LogCaptureFixture) -> None:
    meet_as_threads(f"tcp://127.0.1.1:{port}", {"SYNCLINE_SECRET": new_secret()})
    assert caplog.messages == []


def test_a_job_on_one_host_needs_no_warning(port: int, node7: str, caplog: pytest.LogCaptureFixture) -> None:
    store_at(f"tcp://{node7}:{port}", 0, 2, 20.0, {"SYNCLINE_SECRET": new_secret()}, is_one_host=True)
    assert caplog.messages == []


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_later_meetings_at_an_address_take_no_more_descriptors(port: int) -> None:
    url, environ = f"tcp://127.0.0.1:{port}", {"SYNCLINE_SECRET": new_secret()}
    store_at(url, 0, 1, 20.0, environ)
    before = descriptors()
    for _ in range(3):
        store_at(url, 0, 1, 20.0, environ)
    assert descriptors() <= before  # less if the first connection was still closing a socket


def test_later_meetings_of_a_group_take_no_more_descriptors() -> None:
    meet = partial(tcp_store_of_rank_0, timeout_s=20.0, address="127.0.0.1")
    run_ranks(1, meet, timeout_s=20.0)
    before = descriptors()
    for _ in range(3):
        run_ranks(1, meet, timeout_s=20.0)
    assert descriptors() <= before


def test_later_meetings_of_a_group_see_no_earlier_keys() -> None:
    for size in (3, 2):
        stores = run_ranks(size, lambda group: tcp_store_of_rank_0(group, 20.0), timeout_s=20.0)
        assert not stores[1].check(["key"])
        stores[0].set("key", "a")
        assert stores[1].get("key") == b"a"


def test_a_later_meeting_finds_the_server_that_listens_then(port: int) -> None:
    """As when rank 0 alone was started again: the other ranks still have a client of the server that ended."""
    url, secret = f"tcp://127.0.0.1:{port}", new_secret()
    for _ in range(2):
        with TCPStoreServer("127.0.0.1", port, secret=secret):
            store = store_at(url, 1, 2, 20.0, {"SYNCLINE_SECRET": secret})
            assert not store.check(["key"])
            store.set("key", "a")


def test_a_fork_makes_clients_of_its_own(port: int) -> None:
    url, environ = f"tcp://127.0.0.1:{port}", {"SYNCLINE_SECRET": new_secret()}
    store = store_at(url, 0, 1, 20.0, environ)
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            own = store_at(url, 1, 2, 20.0, environ)
            own.set("from the child", "a")
            status = int(own is store)
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("from the child") == b"a"


def test_a_fork_does_not_take_its_parents_server_for_its_own(port: int) -> None:
    """The ranks of a new job in forks would meet among the keys of the parent's job."""
    url, environ = f"tcp://127.0.0.1:{port}", {"SYNCLINE_SECRET": new_secret()}
    store = store_at(url, 0, 1, 20.0, environ)
    said = in_fork(lambda: store_at(url, 0, 2, 20.0, environ))
    assert said.startswith(f"StoreUnavailableError: TCP store: port {port} of 127.0.0.1 is in use; give another port")
    store.set("key", "a")


def test_processes(tmp_path: Path, port: int, secret_file: Path) -> None:
    """Groups of processes by each of the ways, one after the other; they listen on one address and leave quietly."""
    (tmp_path / "port").write_text(str(port))
    run_processes(JOB, 2, tmp_path)


def test_processes_that_multiprocessing_started(tmp_path: Path, port: int) -> None:
    """With a rank, a size and an address of this machine they need no secret; without them they are told what is missing."""
    done = subprocess.run(
        [sys.executable, str(SPAWNING_JOB)],
        env={**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("alone: multiprocessing started this process") == 2
    assert sorted(line for line in done.stdout.splitlines() if "sum" in line) == [
        "rank 0 of 2: sum 3.0",
        "rank 1 of 2: sum 3.0",
    ]


def test_an_exit_without_warnings(python: list[str], port: int, secret_file: Path) -> None:
    """Sockets that are still open when the interpreter ends would be told of."""
    script = f"""
import warnings
warnings.simplefilter("always")
from syncline.collectives import init_process_group
init_process_group("gloo", "tcp://127.0.0.1:{port}?secret_file={secret_file}", world_size=1, rank=0)
"""
    done = subprocess.run([*python, "-c", script], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")


# ---- without pyzmq ----


def test_without_pyzmq_ranks_meet_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    meet_as_threads(f"file://{tmp_path}/meeting", {})


@pytest.mark.parametrize("rank", [0, 1])
def test_without_pyzmq_every_rank_is_told_what_an_address_needs(port: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(StoreUnavailableError, match=r"pip install pyzmq.*file:///shared/folder"):
        store_at(f"tcp://127.0.0.1:{port}", rank, 2, 3600.0, {"SYNCLINE_SECRET": new_secret()})


UNDER_TORCHRUN = """
import sys
sys.modules["zmq"] = None
import torch
from syncline.collectives import all_reduce, destroy_process_group, init_process_group
group = init_process_group("gloo", timeout=60)
tensor = torch.tensor([group.rank + 1.0])
all_reduce(tensor)
assert tensor.item() == 3
destroy_process_group()
"""


@pytest.mark.parametrize("words", cases([["--standalone"]], in_full=[[]]), ids=lambda words: " ".join(words) or "static")
def test_without_pyzmq_ranks_meet_under_torchrun(tmp_path: Path, port: int, words: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNDER_TORCHRUN)
    place = words or ["--master-port", str(port)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *place, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
