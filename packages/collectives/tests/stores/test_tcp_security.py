"""Who does not hold the secret can neither read nor write, nor hold up those who do."""

from __future__ import annotations

import os
import pickle
import resource
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from syncline.collectives import InvalidArgumentError, StoreAuthenticationError, StoreError
from syncline.collectives.stores import TCPStore, TCPStoreServer, new_secret
from syncline.collectives.stores.served import Op, Status, pack, unpack
from syncline.collectives.stores.tcp.sockets import private_key, public_key, set_options, split
from test_support.jobs import LIMIT_S

SECRET = new_secret()
A_PICKLE = pickle.dumps(os.system)
A_NAN = struct.pack(">d", float("nan"))
FOREVER = struct.pack(">d", float("inf"))
WRITE, READ = pack(Op.SET, b"theirs", b"1"), pack(Op.GET, struct.pack(">d", 1.0), b"mine")

# How ZMTP, ZeroMQ's protocol, begins: signature, version, mechanism, as-server, filler. Then commands.
GREETING_BYTES, HELLO_BYTES = 64, 202
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


def greeting(mechanism: bytes, version: bytes = b"\x03\x01") -> bytes:
    return (SIGNATURE + version + mechanism.ljust(20, b"\0")).ljust(64, b"\0")


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    with TCPStoreServer(secret=SECRET, proof_timeout=3600) as server:
        yield server


@pytest.fixture
def store(server: TCPStoreServer) -> Iterator[TCPStore]:
    store = TCPStore(server.host, server.port, secret=SECRET)
    store.set("mine", "untouched")
    yield store
    assert store.get("mine") == b"untouched"
    assert not store.check(["theirs"])
    store.close()


class Stranger:
    """A raw connection to the server."""

    def __init__(self, server: TCPStoreServer) -> None:
        self.socket = socket.create_connection((server.host, server.port), 30)

    def send(self, data: bytes) -> None:
        with suppress(ConnectionError):
            self.socket.sendall(data)

    def read_to_the_end(self) -> bytes:
        """All that the server says until it hangs up. Fails by the socket's limit if it does not."""
        data = b""
        with suppress(ConnectionResetError):  # it hung up with something of ours unread
            while more := self.socket.recv(65536):
                data += more
        return data

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


class Peer:
    """A ZeroMQ socket connected to the server, with what monitors it."""

    def __init__(self, server: TCPStoreServer, prepare: Callable[[zmq.Socket[bytes]], None]) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 30_000
        prepare(self.socket)
        self.events = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.events.rcvtimeo = 30_000
        self.socket.connect(f"tcp://{server.host}:{server.port}")

    def ask(self, message: bytes) -> tuple[int, list[bytes]]:
        self.socket.send_multipart([b"", *split(message)])
        return unpack(b"".join(self.socket.recv_multipart()[1:]))

    def is_dropped(self) -> bool:
        """Whether the server hangs up before it has let this peer in."""
        while (event := recv_monitor_message(self.events)["event"]) != zmq.EVENT_DISCONNECTED:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return False
        return True

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.disable_monitor()
        self.events.close(0)
        self.socket.close(0)
        self.context.term()


def with_secrets(of_server: str, of_client: str) -> Callable[[zmq.Socket[bytes]], None]:
    def prepare(socket: zmq.Socket[bytes]) -> None:
        set_options(socket, of_client.encode(), "client")
        socket.curve_serverkey = public_key(of_server.encode(), "server")
        socket.sndhwm = socket.rcvhwm = 1000

    return prepare


def without_keys(socket: zmq.Socket[bytes]) -> None:
    """ZeroMQ's usual state."""


def with_a_password(socket: zmq.Socket[bytes]) -> None:
    socket.plain_username, socket.plain_password = b"client", SECRET.encode()


def friend(server: TCPStoreServer) -> Peer:
    return Peer(server, with_secrets(SECRET, SECRET))


def test_the_right_keys_open_the_door(server: TCPStoreServer, store: TCPStore) -> None:
    """The other tests of this file would pass if the door were walled up."""
    with friend(server) as peer:
        assert peer.ask(READ) == (Status.DONE, [b"untouched"])


OTHER = "not the secret, but long enough"


@pytest.mark.parametrize(
    "prepare",
    [
        without_keys,
        with_a_password,
        with_secrets(OTHER, OTHER),
        with_secrets(OTHER, SECRET),
        with_secrets(SECRET, OTHER),
    ],
    ids=["no keys", "a password", "another secret", "the client's key only", "the server's key only"],
)
def test_a_peer_without_the_keys_is_dropped(
    server: TCPStoreServer, store: TCPStore, prepare: Callable[[zmq.Socket[bytes]], None]
) -> None:
    with Peer(server, prepare) as peer:
        with suppress(zmq.Again):  # it was dropped already: there is nobody to send to, and a send that waits would never end
            peer.socket.send_multipart([b"", WRITE], zmq.DONTWAIT)
        assert peer.is_dropped()


NOISE = [b"".join(struct.pack(">Q", (seed * 2654435761 + i * 40503) % 2**64) for i in range(1000)) for seed in range(8)]
NOT_CURVE = {
    "a bare write": WRITE.ljust(100, b"\0"),
    "a bare read": READ.ljust(100, b"\0"),
    "a pickle": A_PICKLE.ljust(100, b"\0"),
    "a request of the web": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(100),
    "ZeroMQ of version 1": b"\x01\x00" + bytes([len(WRITE) + 1, 0]) + WRITE,
    "ZeroMQ of version 2": SIGNATURE + b"\x01\x05\x00\x00" + bytes([0, len(WRITE)]) + WRITE,
    "ZeroMQ without a mechanism": greeting(b"NULL") + b"\x04\x06\x05READY" + bytes([0, len(WRITE)]) + WRITE,
    "a message in place of the handshake": greeting(b"CURVE") + bytes([0, len(WRITE)]) + WRITE,
    "a first word that nobody can open": greeting(b"CURVE") + b"\x04\xc8\x05HELLO\x01\x00" + b"j" * 192,
    **{f"noise {seed}": noise for seed, noise in enumerate(NOISE)},
}


@pytest.mark.parametrize("data", NOT_CURVE.values(), ids=NOT_CURVE.keys())
def test_what_is_no_handshake_is_dropped(server: TCPStoreServer, store: TCPStore, data: bytes) -> None:
    with Stranger(server) as stranger:
        stranger.send(data)
        assert len(stranger.read_to_the_end()) <= 100, "more than a greeting and a refusal"


@pytest.mark.parametrize("length", [2**17, 2**40, 2**63 - 1, 2**64 - 1])
def test_an_oversize_message_of_a_stranger_is_dropped_by_its_length_alone(
    server: TCPStoreServer, store: TCPStore, length: int
) -> None:
    with Stranger(server) as stranger:
        stranger.send(greeting(b"CURVE") + b"\x06" + struct.pack(">Q", length) + bytes(32))
        stranger.read_to_the_end()


def test_a_wrong_secret_is_an_error_on_the_client(server: TCPStoreServer, store: TCPStore) -> None:
    with pytest.raises(StoreAuthenticationError, match=rf"127\.0\.0\.1:{server.port}.*do not hold the same secret"):
        TCPStore(server.host, server.port, secret=new_secret(), timeout=3600)


class Relay:
    """Stands between a client and the server: it writes down what the client says, and does what it is told with it.

    Args:
        server: where the client's words go; None: nowhere, and the client hears `answer` in their place.
        answer: a greeting, and what the relay says to the client's HELLO.
    """

    def __init__(self, server: TCPStoreServer | None, answer: bytes = b"") -> None:
        self._server = server
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._clients: list[socket.socket] = []
        self.said: list[bytearray] = []
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()
        self.port = int(self._listener.getsockname()[1])
        self.change: Callable[[bytes], bytes] = lambda data: data
        self.hang_up_after_request = False

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._clients.append(client)
                self.said.append(bytearray())
                self._start(self._take, client, self.said[-1])

    def cut(self) -> None:
        for client in self._clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def _start(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()
        return thread

    def _take(self, client: socket.socket, said: bytearray) -> None:
        with client, suppress(OSError):
            if self._server is None:
                client.sendall(self._answer[:GREETING_BYTES])
                while data := client.recv(65536):
                    said += data
                    if len(said) == GREETING_BYTES + HELLO_BYTES:
                        client.sendall(self._answer[GREETING_BYTES:])
                return
            with socket.create_connection((self._server.host, self._server.port)) as onward:
                back = self._start(self._bring_back, onward, client)
                try:
                    while data := client.recv(65536):
                        said += data
                        onward.sendall(self.change(data))
                finally:  # both sockets stay open as long as the other thread uses them
                    with suppress(OSError):
                        onward.shutdown(socket.SHUT_RDWR)
                    back.join()

    def _bring_back(self, onward: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := onward.recv(65536):
                if self.hang_up_after_request:
                    break
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def test_a_server_with_another_secret_is_not_believed() -> None:
    """It would let in anybody, to read what is written. The client leaves before it has asked for anything."""
    welcome = b"\x04\xa8\x07WELCOME" + b"j" * 160
    with (
        Relay(None, greeting(b"CURVE")[:32] + b"\x01" + bytes(31) + welcome) as impostor,
        pytest.raises(StoreAuthenticationError),
    ):
        TCPStore("127.0.0.1", impostor.port, secret=SECRET, timeout=3600)
    said = b"".join(impostor.said)
    assert len(said) == GREETING_BYTES + HELLO_BYTES, "not a greeting and HELLO and no more"
    for role in ("client", "server"):
        for hidden in (SECRET.encode(), bytes.fromhex(SECRET), private_key(SECRET.encode(), role)):
            assert hidden not in said
    with TCPStoreServer(secret=new_secret()) as other, pytest.raises(StoreAuthenticationError):
        TCPStore(other.host, other.port, secret=SECRET, timeout=3600)


def test_a_recorded_session_cannot_be_replayed(server: TCPStoreServer, store: TCPStore) -> None:
    with Relay(server) as relay:
        recorded = TCPStore("127.0.0.1", relay.port, secret=SECRET)
        recorded.add("count", 1)
        recorded.close()
    with Stranger(server) as thief:
        thief.send(max(relay.said, key=len))
        thief.read_to_the_end()
    assert store.get("count") == b"1"


def test_nobody_on_the_way_reads_along(server: TCPStoreServer, store: TCPStore) -> None:
    with Relay(server) as relay:
        private = TCPStore("127.0.0.1", relay.port, secret=SECRET)
        private.set("a key that nobody else sees", b"a value that nobody else sees")
        private.close()
    said = b"".join(relay.said)
    assert len(said) > 300, "the relay was not on the way"
    assert b"that nobody else sees" not in said


def test_what_is_altered_on_the_way_is_not_carried_out(server: TCPStoreServer, store: TCPStore) -> None:
    with Relay(server) as relay:
        disturbed = TCPStore("127.0.0.1", relay.port, secret=SECRET)
        assert disturbed.add("count", 1) == 1
        relay.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        with pytest.raises(StoreError, match="the connection broke"):
            disturbed.add("count", 1)
        disturbed.close()
    assert store.get("count") == b"1"


def test_what_is_said_twice_on_the_way_is_carried_out_once(server: TCPStoreServer, store: TCPStore) -> None:
    with Relay(server) as relay:
        disturbed = TCPStore("127.0.0.1", relay.port, secret=SECRET)
        assert disturbed.add("count", 1) == 1
        relay.change = lambda data: data + data
        with suppress(StoreError):  # the answer may have come before the connection ended
            disturbed.add("count", 1)
        disturbed.close()
    assert store.get("count") == b"2"


def test_a_request_whose_answer_is_lost_is_not_repeated(server: TCPStoreServer, store: TCPStore) -> None:
    with Relay(server) as relay:
        unlucky = TCPStore("127.0.0.1", relay.port, secret=SECRET)
        assert unlucky.add("count", 1) == 1
        relay.hang_up_after_request = True
        with pytest.raises(StoreError, match=r"the connection broke .* is not known"):
            unlucky.add("count", 1)
        relay.hang_up_after_request = False
        assert unlucky.get("count") == b"2", "the handle is of no use any more, or the request was repeated"
        assert unlucky.add("count", 1) == 3
        unlucky.close()


def test_a_connection_that_ended_while_nobody_used_it_is_replaced(server: TCPStoreServer, store: TCPStore) -> None:
    """As behind a firewall that forgets who is silent for long."""
    with Relay(server) as relay:
        silent = TCPStore("127.0.0.1", relay.port, secret=SECRET)
        assert silent.add("count", 1) == 1
        relay.cut()
        assert silent._idle[0]._events.poll(30_000), "the client does not notice"
        assert silent.add("count", 1) == 2
        silent.close()


def test_another_server_at_the_address_is_not_taken_for_the_one_before() -> None:
    with TCPStoreServer(secret=SECRET) as before:
        store, unused = (TCPStore(before.host, before.port, secret=SECRET) for _ in range(2))
        store.add("count", 41)
    with TCPStoreServer(port=before.port, secret=SECRET) as after:
        for _ in range(2):
            with pytest.raises(StoreError, match="another server listens there"):
                store.add("count", 1)
        fresh = TCPStore(after.host, after.port, secret=SECRET)
        assert not fresh.check(["count"])
        for handle in (store, unused, fresh):
            handle.close()


def test_a_server_that_has_ended_is_an_error_at_once() -> None:
    with TCPStoreServer(secret=SECRET) as server:
        store = TCPStore(server.host, server.port, secret=SECRET, timeout=3600)
    for _ in range(2):
        with pytest.raises(StoreError, match="has the process that serves it ended"):
            store.set("key", "1")
    store.close()


BAD_BODIES = {
    "empty": b"",
    "unknown operation": pack(99, b"key"),
    "too few fields": pack(Op.SET, b"theirs"),
    "too many fields": pack(Op.SET, b"theirs", b"1", b"2"),
    "length cut off": pack(Op.SET, b"theirs", b"1")[:-3] + b"\0",
    "field beyond the end": bytes([Op.SET]) + struct.pack(">I", 2**32 - 1) + b"theirs",
    "key is not UTF-8": pack(Op.SET, b"\xff\xfe", b"1"),
    "amount is text": pack(Op.ADD, b"theirs", b"one"),
    "amount without end": pack(Op.ADD, b"theirs", b"9" * 1000),
    "limit is NaN": pack(Op.GET, A_NAN, b"theirs"),
    "limit is infinite": pack(Op.GET, FOREVER, b"theirs"),
    "limit is short": pack(Op.GET, b"\0", b"theirs"),
    "wait without limit": pack(Op.WAIT),
    "a pickle": A_PICKLE,
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_a_client_with_the_secret_that_talks_nonsense_is_told_so(server: TCPStoreServer, store: TCPStore, body: bytes) -> None:
    with friend(server) as peer:
        assert peer.ask(body)[0] == Status.REFUSED
        assert peer.ask(READ) == (Status.DONE, [b"untouched"])


def test_a_message_of_no_parts_is_survived(server: TCPStoreServer, store: TCPStore) -> None:
    with friend(server) as peer:
        peer.socket.send(b"")
        assert unpack(peer.socket.recv_multipart()[1])[0] == Status.REFUSED


def test_a_part_that_is_too_long_ends_the_connection(server: TCPStoreServer, store: TCPStore) -> None:
    with friend(server) as peer:
        assert peer.ask(READ) == (Status.DONE, [b"untouched"])
        peer.socket.send_multipart([b"", pack(Op.SET, b"theirs", bytes(2**20))])
        while recv_monitor_message(peer.events)["event"] != zmq.EVENT_DISCONNECTED:
            pass


def test_a_second_request_during_a_wait_is_refused(server: TCPStoreServer, store: TCPStore) -> None:
    with friend(server) as peer:
        peer.socket.send_multipart([b"", pack(Op.GET, struct.pack(">d", 20.0), b"never")])
        status, (reason,) = peer.ask(WRITE)
        assert (status, reason) == (Status.REFUSED, b"a request before the answer to the one before")


HALF_WAY = {
    "nothing": b"",
    "a byte": b"x",
    "half a greeting": greeting(b"CURVE")[:20],
    "a greeting": greeting(b"CURVE"),
    "all but a byte of the first word": greeting(b"CURVE") + b"\x04\xc8\x05HELLO\x01\x00" + b"j" * 191,
}


@pytest.mark.parametrize("beginning", HALF_WAY.values(), ids=HALF_WAY.keys())
def test_who_is_half_way_in_blocks_nobody_and_is_dropped_in_the_end(beginning: bytes) -> None:
    with TCPStoreServer(secret=SECRET, proof_timeout=0.2) as server, Stranger(server) as stranger:
        stranger.send(beginning)
        store = TCPStore(server.host, server.port, secret=SECRET)
        store.set("key", "1")
        assert store.get("key") == b"1"
        stranger.read_to_the_end()
        store.set("after", "1")  # one that has proved itself stays, however long ago
        assert store.get("after") == b"1"
        store.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_one_who_does_not_read_his_answers_blocks_nobody_and_fills_no_memory(server: TCPStoreServer, store: TCPStore) -> None:
    store.set("large", bytes(4 * 2**20))
    before = resident_bytes()
    with friend(server) as peer:
        peer.socket.rcvhwm = 1
        for _ in range(150):
            peer.socket.send_multipart([b"", pack(Op.GET, struct.pack(">d", 1.0), b"large")])
        peer.socket.send_multipart([b"", pack(Op.SET, b"last", b"1")])
        store.wait(["last"], 60)  # all have been answered, or their answers dropped
        assert [store.add("other", 1) for _ in range(100)][-1] == 100
        assert resident_bytes() - before < 200 * 2**20, "answers that nobody reads are kept"


def test_a_crowd_of_strangers_does_not_keep_the_others_out(server: TCPStoreServer, store: TCPStore) -> None:
    crowd = [Stranger(server) for _ in range(200)]
    late = TCPStore(server.host, server.port, secret=SECRET, timeout=60)
    assert late.get("mine") == b"untouched"
    late.close()
    for stranger in crowd:
        stranger.socket.close()


SHORT_OF_DESCRIPTORS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
from syncline.collectives.stores import TCPStoreServer
with TCPStoreServer(secret=sys.argv[1], proof_timeout=0.5) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""


def test_a_crowd_that_takes_all_descriptors_goes_away_in_the_end(python: list[str]) -> None:
    command = [*python, "-c", SHORT_OF_DESCRIPTORS, SECRET]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        crowd = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(100)]
        store = TCPStore("127.0.0.1", port, secret=SECRET, timeout=60)
        assert store.add("count", 1) == 1
        store.close()
        for stranger in crowd:
            stranger.close()
        process.communicate("", timeout=LIMIT_S)
    assert process.returncode == 0


@pytest.mark.parametrize("clients", [32, 100])
def test_many_who_come_at_once_all_get_in(server: TCPStoreServer, clients: int) -> None:
    start = threading.Barrier(clients)

    def come(rank: int) -> int:
        start.wait(60)
        store = TCPStore(server.host, server.port, secret=SECRET)
        place = store.add("count", 1)
        store.close()
        return place

    with ThreadPoolExecutor(clients) as pool:
        assert sorted(pool.map(come, range(clients))) == list(range(1, clients + 1))


@pytest.mark.parametrize("secret", ["", "short", b"fifteen bytes..", "x" * 15])
def test_a_secret_that_can_be_guessed_is_refused(secret: str | bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="at least 16 bytes"):
        TCPStoreServer(secret=secret)
    with pytest.raises(InvalidArgumentError, match="at least 16 bytes"):
        TCPStore("127.0.0.1", 1, secret=secret)


def test_secrets_are_long_and_new() -> None:
    assert len({new_secret() for _ in range(10)}) == 10
    assert len(bytes.fromhex(new_secret())) == 32


def test_every_secret_and_role_has_a_key_of_its_own() -> None:
    keys = [private_key(secret, role) for secret in (b"s" * 16, b"t" * 16) for role in ("server", "client")]
    assert len(set(keys)) == 4
    assert {len(key) for key in keys} == {32}
    assert private_key(b"s" * 16, "server") == keys[0]


def test_an_error_does_not_show_the_secret(server: TCPStoreServer, store: TCPStore) -> None:
    wrong = new_secret()
    with pytest.raises(StoreAuthenticationError) as caught:
        TCPStore(server.host, server.port, secret=wrong)
    assert wrong not in str(caught.value)
    assert SECRET not in repr(store) + repr(server) + store.describe()
