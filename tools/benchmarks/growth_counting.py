"""What a rank has sent, asked and taken so far: read off its sockets, its store and its memory."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from syncline.collectives.stores import TCPStore
from syncline.collectives.stores.served import Op

# Where Linux' struct tcp_info has them.
_ESTABLISHED, _INFO_BYTES = 1, 256
_BYTES_SENT_AT, _DATA_SEGMENTS_AT = 200, 156


class Counts(NamedTuple):
    """Of one rank, since it began or since another moment.

    Attributes:
        connections: TCP connections to other ranks.
        messages: segments with data that it sent over these: a small message is one, whichever library sends it.
        message_bytes: their bytes, headers of the library included.
        requests: to the store, those left out that only ask whether keys are there, for their number depends on the time.
        request_bytes: keys and values of all requests, and their answers.
        memory_bytes: that this process alone has, resident.
    """

    connections: int = 0
    messages: int = 0
    message_bytes: int = 0
    requests: int = 0
    request_bytes: int = 0
    memory_bytes: int = 0

    def since(self, before: Counts) -> Counts:
        """What came in between."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


class CountingStore(TCPStore):
    """A client of a TCP store that counts its requests."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        self.requests = self.request_bytes = 0
        super().__init__(host, port, secret=secret)

    def _call(self, op: Op, *fields: bytes) -> list[bytes]:
        return self._counted(op, fields, super()._call(op, *fields))

    def _call_waiting(self, op: Op, keys: list[str], timeout_s: float) -> list[bytes]:
        return self._counted(op, [key.encode() for key in keys], super()._call_waiting(op, keys, timeout_s))

    def _counted(self, op: Op, asked: Any, answer: list[bytes]) -> list[bytes]:
        if op is not Op.CHECK:
            self.requests += 1
            self.request_bytes += sum(map(len, asked)) + sum(map(len, answer))
        return answer


def counts(store: CountingStore | None) -> Counts:
    """All that this process has counted since it began.

    Args:
        store: whose requests count, and whose connections do not; None if there is none.
    """
    connections = messages = sent = 0
    for info in _connections(None if store is None else store._port):
        connections += 1
        messages += struct.unpack_from("I", info, _DATA_SEGMENTS_AT)[0]
        sent += struct.unpack_from("Q", info, _BYTES_SENT_AT)[0]
    requests, request_bytes = (0, 0) if store is None else (store.requests, store.request_bytes)
    return Counts(connections, messages, sent, requests, request_bytes, _private_bytes())


def _connections(left_out: int | None) -> Iterator[bytes]:
    """What the kernel says of each TCP connection of this process, but those to that port."""
    for name in os.listdir("/proc/self/fd"):
        info = _connection(int(name), left_out)
        if info is not None:
            yield info


def _connection(descriptor: int, left_out: int | None) -> bytes | None:
    if not _is_socket(descriptor):
        return None
    with socket.socket(fileno=os.dup(descriptor)) as opened:
        if opened.type is not socket.SOCK_STREAM or opened.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return info if info[0] == _ESTABLISHED and opened.getpeername()[1] != left_out else None


def _is_socket(descriptor: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except OSError:  # that of the listing itself
        return False


def _private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))
