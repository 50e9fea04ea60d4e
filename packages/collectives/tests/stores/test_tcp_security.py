"""Who does not hold the secret can neither read nor write, nor hold up those who do."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from syncline.collectives import InvalidArgumentError, StoreAuthenticationError
from syncline.collectives.stores import TCPStore, TCPStoreServer, new_secret
from syncline.collectives.stores.tcp.loop import MOST_STRANGERS
from syncline.collectives.stores.tcp.sealing import HEAD_BYTES, Opener, Sealer
from syncline.collectives.stores.tcp.secret import ANSWER_BYTES, HELLO_BYTES, MAGIC, PROOF_BYTES, REFUSAL, Handshake
from syncline.collectives.stores.tcp.wire import Op, pack, unpack

SECRET = new_secret()
A_PICKLE = pickle.dumps(os.system)
A_NAN = struct.pack(">d", float("nan"))
FOREVER = struct.pack(">d", float("inf"))


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    with TCPStoreServer(secret=SECRET) as server:
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
        self.hello = self.read(HELLO_BYTES)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self.socket.recv(size - len(data))):
            data += more
        return data

    def read_to_the_end(self) -> bytes:
        """All that the server says until it hangs up. Fails by the socket's limit if it does not."""
        data = b""
        try:
            while more := self.socket.recv(65536):
                data += more
        except ConnectionResetError:  # it hung up with something of ours unread
            pass
        return data

    def prove(self, secret: str) -> Handshake:
        nonce = secrets.token_bytes(32)
        handshake = Handshake(secret.encode(), self.hello[len(MAGIC) :], nonce)
        self.socket.sendall(nonce + handshake.client_proof())
        return handshake

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def frame(body: bytes) -> bytes:
    """What an honest client would send, but for the key."""
    return Sealer(b"guessed key").seal(body)


WRITE, READ = pack(Op.SET, b"theirs", b"1"), pack(Op.GET, struct.pack(">d", 1.0), b"mine")


@pytest.mark.parametrize("request_", [WRITE, READ], ids=["write", "read"])
def test_a_stranger_who_skips_the_proof_gets_nothing(server: TCPStoreServer, store: TCPStore, request_: bytes) -> None:
    with Stranger(server) as stranger:
        stranger.socket.sendall(frame(request_).ljust(ANSWER_BYTES, b"\0"))
        assert stranger.read_to_the_end() in (REFUSAL, b"")


@pytest.mark.parametrize("request_", [WRITE, READ], ids=["write", "read"])
def test_a_stranger_who_goes_on_after_a_wrong_proof_gets_nothing(
    server: TCPStoreServer, store: TCPStore, request_: bytes
) -> None:
    with Stranger(server) as stranger:
        handshake = stranger.prove("not the secret, but long enough")
        assert stranger.read(PROOF_BYTES) == REFUSAL
        try:
            stranger.socket.sendall(Sealer(handshake.client_key()).seal(request_))
        except ConnectionError:
            pass
        assert stranger.read_to_the_end() == b""


def test_the_right_proof_opens_the_door(server: TCPStoreServer, store: TCPStore) -> None:
    """The other tests of this file would pass if the door were walled up."""
    with Stranger(server) as friend:
        handshake = friend.prove(SECRET)
        assert friend.read(PROOF_BYTES) == handshake.server_proof()
        friend.socket.sendall(Sealer(handshake.client_key()).seal(READ))
        opener = Opener(handshake.server_key(), 1000)
        while (answer := opener.next()) is None:
            opener.feed(friend.socket.recv(1000))
        assert unpack(answer)[1] == [b"untouched"]


def test_a_wrong_secret_is_an_error_on_the_client(server: TCPStoreServer, store: TCPStore) -> None:
    with pytest.raises(StoreAuthenticationError, match=rf"127\.0\.0\.1:{server.port}.*do not hold the same secret"):
        TCPStore(server.host, server.port, secret=new_secret(), timeout=3600)


def test_a_server_with_another_secret_is_not_believed() -> None:
    """It lets in anybody, to read what is written. The client leaves before it has said anything."""
    said: list[bytes] = []

    def let_in_anybody(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(30)
            connection.sendall(MAGIC + bytes(32))
            said.append(connection.recv(ANSWER_BYTES, socket.MSG_WAITALL))
            connection.sendall(secrets.token_bytes(32))
            said.append(connection.recv(65536))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(let_in_anybody, listener)
        with pytest.raises(StoreAuthenticationError):
            TCPStore("127.0.0.1", listener.getsockname()[1], secret=SECRET, timeout=3600)
        serving.result(60)
    assert len(said[0]) == ANSWER_BYTES
    assert SECRET.encode() not in said[0]
    assert said[1] == b""


def test_a_recorded_handshake_and_write_cannot_be_replayed(server: TCPStoreServer, store: TCPStore) -> None:
    with Stranger(server) as friend:
        nonce = secrets.token_bytes(32)
        handshake = Handshake(SECRET.encode(), friend.hello[len(MAGIC) :], nonce)
        recorded = nonce + handshake.client_proof() + Sealer(handshake.client_key()).seal(pack(Op.ADD, b"count", b"1"))
        friend.socket.sendall(recorded)
        friend.read(PROOF_BYTES + HEAD_BYTES)
    assert store.get("count", 60) == b"1"
    with Stranger(server) as thief:
        thief.socket.sendall(recorded)
        assert thief.read_to_the_end() in (REFUSAL, b"")
    assert store.get("count") == b"1"


def test_a_recorded_write_cannot_be_repeated_within_its_connection(server: TCPStoreServer, store: TCPStore) -> None:
    with Stranger(server) as friend:
        handshake = friend.prove(SECRET)
        sealed = Sealer(handshake.client_key()).seal(pack(Op.ADD, b"count", b"1"))
        friend.socket.sendall(sealed + sealed)
        assert len(friend.read_to_the_end()) < PROOF_BYTES + 2 * HEAD_BYTES
    assert store.get("count") == b"1"


def test_the_servers_proof_cannot_be_sent_back_to_it(server: TCPStoreServer, store: TCPStore) -> None:
    """Who mirrors the server's nonce and derives nothing himself has no proof to offer."""
    nonce_of_first = secrets.token_bytes(32)
    with Stranger(server) as friend:
        handshake = Handshake(SECRET.encode(), friend.hello[len(MAGIC) :], nonce_of_first)
        assert handshake.client_proof() != handshake.server_proof()
        friend.socket.sendall(nonce_of_first + handshake.server_proof())
        assert friend.read_to_the_end() == REFUSAL


def test_the_keys_of_both_directions_and_of_every_connection_differ() -> None:
    one, other = Handshake(b"s" * 16, b"a" * 32, b"b" * 32), Handshake(b"s" * 16, b"a" * 32, b"c" * 32)
    derived = [
        value
        for handshake in (one, other)
        for value in (handshake.client_proof(), handshake.server_proof(), handshake.client_key(), handshake.server_key())
    ]
    assert len(set(derived)) == 8


def test_the_server_draws_a_new_nonce_for_everybody(server: TCPStoreServer, store: TCPStore) -> None:
    hellos = []
    for _ in range(5):
        with Stranger(server) as stranger:
            hellos.append(stranger.hello)
    assert len(set(hellos)) == 5


@pytest.mark.parametrize("seed", range(8))
def test_garbage_is_survived(server: TCPStoreServer, store: TCPStore, seed: int) -> None:
    noise = b"".join(struct.pack(">Q", (seed * 2654435761 + i * 40503) % 2**64) for i in range(1000))
    with Stranger(server) as stranger:
        try:
            stranger.socket.sendall(noise)
        except ConnectionError:
            pass
        assert stranger.read_to_the_end() in (REFUSAL, b"")


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
def test_a_client_with_the_secret_that_talks_nonsense_is_dropped(server: TCPStoreServer, store: TCPStore, body: bytes) -> None:
    with Stranger(server) as friend:
        handshake = friend.prove(SECRET)
        assert friend.read(PROOF_BYTES) == handshake.server_proof()
        friend.socket.sendall(Sealer(handshake.client_key()).seal(body))
        assert friend.read_to_the_end() == b""


def test_a_message_with_a_wrong_seal_is_dropped(server: TCPStoreServer, store: TCPStore) -> None:
    """Who takes over the connection of an honest client still cannot write."""
    with Stranger(server) as friend:
        friend.prove(SECRET)
        friend.read(PROOF_BYTES)
        friend.socket.sendall(frame(WRITE))
        assert friend.read_to_the_end() == b""


def test_an_oversize_message_is_dropped_by_its_length_alone(server: TCPStoreServer, store: TCPStore) -> None:
    with Stranger(server) as friend:
        friend.prove(SECRET)
        friend.read(PROOF_BYTES)
        friend.socket.sendall(struct.pack(">I", 2**32 - 1) + bytes(32))
        assert friend.read_to_the_end() == b""


def test_a_second_request_during_a_wait_is_dropped(server: TCPStoreServer, store: TCPStore) -> None:
    with Stranger(server) as friend:
        sealer = Sealer(friend.prove(SECRET).client_key())
        friend.read(PROOF_BYTES)
        friend.socket.sendall(sealer.seal(pack(Op.GET, struct.pack(">d", 3600.0), b"never")) + sealer.seal(WRITE))
        assert friend.read_to_the_end() == b""


@pytest.mark.parametrize("beginning", [b"", b"x", bytes(ANSWER_BYTES - 1)], ids=["nothing", "a byte", "all but one"])
def test_who_is_half_way_in_blocks_nobody_and_is_dropped_in_the_end(beginning: bytes) -> None:
    with TCPStoreServer(secret=SECRET, proof_timeout=0.2) as server, Stranger(server) as stranger:
        stranger.socket.sendall(beginning)
        store = TCPStore(server.host, server.port, secret=SECRET)
        store.set("key", "1")
        assert store.get("key") == b"1"
        assert stranger.read_to_the_end() == b""
        store.set("after", "1")  # one that has proved itself stays, however long ago
        assert store.get("after") == b"1"
        store.close()


def test_one_who_does_not_read_his_answers_blocks_nobody(server: TCPStoreServer, store: TCPStore) -> None:
    store.set("large", bytes(16 * 2**20))
    with Stranger(server) as friend:
        sealer = Sealer(friend.prove(SECRET).client_key())
        friend.read(PROOF_BYTES)
        get, add = pack(Op.GET, struct.pack(">d", 1.0), b"large"), pack(Op.ADD, b"count", b"1")
        friend.socket.sendall(sealer.seal(get) + sealer.seal(add))
        assert [store.add("other", 1) for _ in range(100)][-1] == 100
        assert not store.check(["count"]), "the second request was served before the first answer was read"


def test_a_crowd_of_strangers_does_not_keep_the_others_out() -> None:
    with TCPStoreServer(secret=SECRET, proof_timeout=3600) as server:
        crowd = [Stranger(server) for _ in range(MOST_STRANGERS + 10)]
        store = TCPStore(server.host, server.port, secret=SECRET, timeout=60)
        store.set("key", "1")
        assert [stranger.read_to_the_end() for stranger in crowd[:10]] == [b""] * 10, "the oldest were not dropped"
        for stranger in crowd:
            stranger.socket.close()
        store.close()


def test_many_who_come_at_once_all_get_in(server: TCPStoreServer) -> None:
    start = threading.Barrier(32)

    def come(rank: int) -> int:
        start.wait(60)
        store = TCPStore(server.host, server.port, secret=SECRET)
        place = store.add("count", 1)
        store.close()
        return place

    with ThreadPoolExecutor(32) as pool:
        assert sorted(pool.map(come, range(32))) == list(range(1, 33))


@pytest.mark.parametrize("secret", ["", "short", b"fifteen bytes..", "x" * 15])
def test_a_secret_that_can_be_guessed_is_refused(secret: str | bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="at least 16 bytes"):
        TCPStoreServer(secret=secret)
    with pytest.raises(InvalidArgumentError, match="at least 16 bytes"):
        TCPStore("127.0.0.1", 1, secret=secret)


def test_secrets_are_long_and_new() -> None:
    assert len({new_secret() for _ in range(10)}) == 10
    assert len(bytes.fromhex(new_secret())) == 32


def test_an_error_does_not_show_the_secret(server: TCPStoreServer, store: TCPStore) -> None:
    wrong = new_secret()
    with pytest.raises(StoreAuthenticationError) as caught:
        TCPStore(server.host, server.port, secret=wrong)
    assert wrong not in str(caught.value)
    assert SECRET not in repr(store) + repr(server) + store.describe()
