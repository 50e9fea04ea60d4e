"""What only the TCP store promises: where it listens, what happens when an end is gone, late or too talkative."""

from __future__ import annotations

import errno
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from syncline.collectives import InvalidArgumentError, StoreError, StoreTimeout, StoreUnavailableError
from syncline.collectives.stores import TCPStore, TCPStoreServer, new_secret
from syncline.collectives.stores.store import LONGEST_STORE_TIMEOUT_S
from syncline.collectives.stores.tcp import connection
from syncline.collectives.stores.tcp.sockets import LONGEST_MESSAGE_BYTES

SECRET = new_secret()


def listening() -> set[tuple[str, int]]:
    """Every address and port that any process listens on, as the kernel lists them, IPv6 included."""
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            local, state = line.split()[1], line.split()[3]
            if state == "0A":
                address, port = local.split(":")
                found.add((address, int(port, 16)))
    return found


@pytest.mark.parametrize(("host", "in_kernel"), [("127.0.0.1", "0100007F"), ("127.0.0.2", "0200007F")])
def test_it_listens_on_exactly_the_address_given(host: str, in_kernel: str) -> None:
    with TCPStoreServer(host, secret=SECRET) as server:
        assert server.host == host
        assert {address for address, port in listening() if port == server.port} == {in_kernel}
        other = "127.0.0.1" if host == "127.0.0.2" else "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, server.port), 5)
    assert server.port not in {port for _, port in listening()}


def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    with TCPStoreServer(secret=SECRET) as server:
        assert server.host == "127.0.0.1"
        assert server.port > 0


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "0"])
def test_wildcards_are_refused(host: str) -> None:
    with pytest.raises(InvalidArgumentError, match="every address of this machine"):
        TCPStoreServer(host, secret=SECRET)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_client_does_not_wait_for_a_server_at_a_wildcard(host: str) -> None:
    with pytest.raises(InvalidArgumentError, match="every address of this machine"):
        TCPStore(host, 29500, secret=SECRET, timeout=1)


def test_a_port_in_use_is_named() -> None:
    with (
        TCPStoreServer(secret=SECRET) as server,
        pytest.raises(StoreUnavailableError, match=rf"port {server.port} of 127\.0\.0\.1 is in use"),
    ):
        TCPStoreServer(port=server.port, secret=SECRET)


def test_a_port_that_was_left_is_free_again() -> None:
    with TCPStoreServer(secret=SECRET) as server:
        store = TCPStore(server.host, server.port, secret=SECRET)
    with TCPStoreServer(port=server.port, secret=SECRET) as again:
        assert again.port == server.port
    store.close()


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(StoreUnavailableError, match=r"192\.0\.2\.1 is not an address of this machine"):
        TCPStoreServer("192.0.2.1", secret=SECRET)


@pytest.mark.parametrize("port", [-1, 65536])
def test_an_impossible_port_is_named(port: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"port={port}"):
        TCPStoreServer(port=port, secret=SECRET)


@contextmanager
def listener_of(greet: Callable[[socket.socket], object]) -> Iterator[int]:
    """The port of a server that does with each client what `greet` says, each on a thread of its own."""

    def take(client: socket.socket) -> None:
        with client, suppress(OSError):
            greet(client)

    def listen() -> None:
        with suppress(OSError):  # until the listener is shut down
            while True:
                threading.Thread(target=take, args=listener.accept()[:1]).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listening = threading.Thread(target=listen)
        listening.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        listening.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_no_server_is_an_error_after_the_limit() -> None:
    port = free_port()
    with pytest.raises(StoreTimeout, match=rf"127\.0\.0\.1:{port}: no server was there within 0\.05 s .*refused"):
        TCPStore("127.0.0.1", port, secret=SECRET, timeout=0.05)


def test_a_client_waits_for_a_server_that_starts_later() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(TCPStore, "127.0.0.1", port, secret=SECRET, timeout=60)
        with pytest.raises(StoreTimeout):  # by now the other has been refused, too
            TCPStore("127.0.0.1", port, secret=SECRET, timeout=0.1)
        assert not opening.done()
        with TCPStoreServer(port=port, secret=SECRET):
            store = opening.result(60)
            store.set("key", "1")
            store.close()


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n".ljust(100), b"SSH-2.0-OpenSSH_9.2\r\n"])
def test_what_listens_but_is_no_store_is_named(greeting: bytes) -> None:
    def greet(client: socket.socket) -> None:
        client.sendall(greeting)
        client.recv(1)

    with (
        listener_of(greet) as port,
        pytest.raises(StoreError, match="the program that listens there does not answer as a store") as caught,
    ):
        TCPStore("127.0.0.1", port, secret=SECRET, timeout=60)
    assert not isinstance(caught.value, StoreTimeout)


def test_what_listens_and_says_nothing_is_given_up_after_the_limit() -> None:
    with (
        listener_of(lambda client: client.recv(1000, socket.MSG_WAITALL)) as port,
        pytest.raises(StoreTimeout, match=rf"127\.0\.0\.1:{port}: no server was there within 0\.2 s .*said nothing"),
    ):
        TCPStore("127.0.0.1", port, secret=SECRET, timeout=0.2)


def test_what_says_nothing_for_long_has_taken_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 finds the port in use at once; the others need not wait for all of their time."""
    monkeypatch.setattr(connection, "GREETING_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            StoreError, match=r"says nothing for 0\.2 s\nIf it is rank 0 of this job, that process is stopped"
        ) as caught:
            TCPStore("127.0.0.1", taken.getsockname()[1], secret=SECRET, timeout=3600)
    assert not isinstance(caught.value, StoreTimeout)


def test_a_server_that_ends_ends_the_waits_of_its_clients() -> None:
    server = TCPStoreServer(secret=SECRET)
    store = TCPStore(server.host, server.port, secret=SECRET)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "never", 3600)
        with pytest.raises(StoreTimeout):
            store.get("never either", 0.05)
        server.close()
        server.close()
        with pytest.raises(StoreError, match="has the process that serves it ended") as caught:
            waiting.result(60)
    assert not isinstance(caught.value, StoreTimeout)
    store.close()


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.collectives.stores.tcp.store.GRACE_S", 0.05)
    with TCPStoreServer(secret=SECRET) as server:
        store = TCPStore(server.host, server.port, secret=SECRET)
        monkeypatch.setattr("syncline.collectives.stores.tcp.loop.ServerLoop._send_answers", lambda self, replies: None)
        with pytest.raises(StoreTimeout, match="the server did not answer"):
            store.get("key", 0.05)
        store.close()


def test_a_closed_handle_says_so() -> None:
    with TCPStoreServer(secret=SECRET) as server:
        store = TCPStore(server.host, server.port, secret=SECRET)
        store.close()
        store.close()
        with pytest.raises(StoreError, match="this handle was closed"):
            store.num_keys()


def test_a_long_limit_stops_nobody() -> None:
    """The longest limit there is passes through every clock on the way."""
    with TCPStoreServer(secret=SECRET) as server:
        store = TCPStore(server.host, server.port, secret=SECRET, timeout=float("inf"))
        assert store.timeout.total_seconds() == LONGEST_STORE_TIMEOUT_S
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "late")
            with pytest.raises(StoreTimeout):
                store.get("never", 0.05)
            store.set("late", "1")
            assert waiting.result(60) == b"1"
        store.close()


def test_a_message_that_is_too_long_is_refused_before_it_is_sent() -> None:
    with TCPStoreServer(secret=SECRET) as server:
        store = TCPStore(server.host, server.port, secret=SECRET)
        with pytest.raises(InvalidArgumentError, match="send data through a process group"):
            store.set("key", bytes(LONGEST_MESSAGE_BYTES))
        store.set("key", "1")
        assert store.get("key") == b"1"
        store.close()


def test_a_server_may_allow_less_than_the_client() -> None:
    with TCPStoreServer(secret=SECRET, max_message_bytes=1000) as server:
        store = TCPStore(server.host, server.port, secret=SECRET)
        with pytest.raises(InvalidArgumentError, match=r"10000012 bytes, where this server allows 1000"):
            store.set("key", bytes(10_000_000))
        assert not store.check(["key"])
        store.set("key", bytes(900))
        store.close()


def test_a_value_that_fills_every_buffer_arrives() -> None:
    value = bytes(range(256)) * (32 * 2**20 // 256)
    with TCPStoreServer(secret=SECRET) as server:
        store = TCPStore(server.host, server.port, secret=SECRET)
        store.set("large", value)
        assert store.get("large") == value
        store.close()


def test_after_a_refusal_the_connection_is_still_good() -> None:
    with TCPStoreServer(secret=SECRET) as server:
        store = TCPStore(server.host, server.port, secret=SECRET)
        store.set("text", "abc")
        with pytest.raises(InvalidArgumentError, match=r"TCP store at 127.*add\('text'\): expected a decimal number.*abc"):
            store.add("text", 1)
        store.set("number", str(2**63 - 1))
        with pytest.raises(InvalidArgumentError, match="does not fit into 64 bits"):
            store.add("number", 1)
        assert store.get("number") == str(2**63 - 1).encode()
        assert len(store._idle) == 1, "the connection was given up"
        store.close()


def test_it_works_over_ipv6() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    with TCPStoreServer("::1", secret=SECRET) as server:
        assert {address for address, port in listening() if port == server.port} == {"00000000000000000000000001000000"}
        store = TCPStore("::1", server.port, secret=SECRET)
        store.set("key", "1")
        assert store.get("key") == b"1"
        store.close()


def test_a_name_leads_to_whichever_address_listens() -> None:
    """A name may stand for several addresses, of which the server has one."""
    with TCPStoreServer("127.0.0.1", secret=SECRET) as server:
        store = TCPStore("localhost", server.port, secret=SECRET)
        assert store.add("count", 1) == 1
        store.close()


@contextmanager
def address_that_never_answers(address: str, port: int) -> Iterator[None]:
    """A listener whose queue of connections is full, so that the system drops all further attempts to connect."""
    with ExitStack() as sockets:
        full = sockets.enter_context(socket.socket())
        full.bind((address, port))
        full.listen(0)
        for _ in range(4):
            one = sockets.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex((address, port))
        yield


def test_an_address_that_never_answers_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def two_addresses(host: str, *more: Any, **named: Any) -> Any:
        hosts = ["127.0.0.2", "127.0.0.1"] if host == "node7" else [host]
        return [found for one in hosts for found in look_up(one, *more, **named)]

    with TCPStoreServer("127.0.0.1", secret=SECRET) as server, address_that_never_answers("127.0.0.2", server.port):
        monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
        store = TCPStore("node7", server.port, secret=SECRET, timeout=4)
        assert store.add("count", 1) == 1
        store.close()
        # Half of a long limit would be a long time, too.
        monkeypatch.setattr(connection, "_ADDRESS_S", 0.5)
        TCPStore("node7", server.port, secret=SECRET, timeout=3600).close()


def test_many_waits_that_clients_gave_up_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.collectives.stores.served.LONGEST_WAIT_S", 0.05)
    with TCPStoreServer(secret=SECRET) as server:
        store = TCPStore(server.host, server.port, secret=SECRET)
        with pytest.raises(StoreTimeout, match=r"nobody set 'never' within 0\.3 s"):
            store.get("never", 0.3)  # asked for again and again
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "late", 60)
            with pytest.raises(StoreTimeout):
                store.get("never", 0.3)
            store.set("late", "1")
            assert waiting.result(60) == b"1"
        store.close()


@pytest.mark.parametrize("open_one", [TCPStoreServer, lambda secret: TCPStore("127.0.0.1", 1, secret=secret)])
def test_without_pyzmq_the_error_says_what_to_install(open_one: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(StoreUnavailableError, match=r"needs pyzmq.*pip install pyzmq"):
        open_one(secret=SECRET)


def test_a_client_without_descriptors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with TCPStoreServer(secret=SECRET) as server:
        monkeypatch.setattr(zmq.Context, "socket", none_left)
        with pytest.raises(StoreTimeout, match="Too many open files"):
            TCPStore(server.host, server.port, secret=SECRET, timeout=0.05)
        with pytest.raises(StoreUnavailableError, match="Too many open files"):
            TCPStoreServer(secret=SECRET)
