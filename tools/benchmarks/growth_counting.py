"""What a rank has sent, requested and allocated so far, read from its sockets, its store and its memory."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from syncline.collectives.stores import TCPStore
from syncline.collectives.stores.served import Op

# The places of these values in Linux' struct tcp_info.
_ESTABLISHED, _INFO_BYTES = 1, 256
_BYTES_SENT_AT, _DATA_SEGMENTS_AT = 200, 156


class Counts(NamedTuple):
    """Counts of one rank, since its start or since another moment.

    Attributes:
        connections: TCP connections to other ranks.
        messages: segments with data sent over these connections. A small message is one segment, whichever library sends it.
        message_bytes: bytes of these segments, with the library's headers.
        requests: requests to the store. Questions whether keys are there do not count, because their number depends on time.
        request_bytes: keys and values of all requests, and their answers.
        memory_bytes: resident memory that this process does not share.
    """

    connections: int = 0
    messages: int = 0
    message_bytes: int = 0
    requests: int = 0
    request_bytes: int = 0
    memory_bytes: int = 0

    def since(self, before: Counts) -> Counts:
        """The counts between two moments."""
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
    """Everything that this process has counted since its start.

    Args:
        store: its requests count, and its connections do not; None if there is no store.
    """
    connections = messages = sent = 0
    for info in _connections(None if store is None else store._port):
        connections += 1
        messages += struct.unpack_from("I", info, _DATA_SEGMENTS_AT)[0]
        sent += struct.unpack_from("Q", info, _BYTES_SENT_AT)[0]
    requests, request_bytes = (0, 0) if store is None else (store.requests, store.request_bytes)
    return Counts(connections, messages, sent, requests, request_bytes, _private_bytes())


def _connections(left_out: int | None) -> Iterator[bytes]:
    """The kernel's information about each TCP connection of this process, except those to one port."""
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
    except OSError:  # the descriptor of the listing itself
        return False


def _private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))
