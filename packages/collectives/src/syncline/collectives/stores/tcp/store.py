"""TCPStore: a handle on the table that a `TCPStoreServer` holds."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from operator import index

from ...contract.deadline import Deadline
from ...errors import InvalidArgumentError, StoreError, StoreTimeout
from ..polling import poll
from ..store import Store, as_bytes, as_key, as_keys, never_came
from .channel import Channel
from .sealing import LONGEST_MESSAGE_BYTES
from .secret import as_secret
from .wire import Op, ProtocolError, Status, pack, pack_seconds

GRACE_S = 5.0
"""The server watches the time limits of waits. This much later the client stops to believe that it is alive."""


class TCPStore(Store):
    """A client of a `TCPStoreServer`.

    Each thread that calls has a connection of its own while the call lasts, so that one that waits holds up no other;
    connections are kept for later calls. Cost of a call: one round trip; four more for a new connection.

    Args:
        host: address or name of the server.
        port: its port.
        secret: what the server was given.
        timeout: seconds or a timedelta; see `Store`. It also limits how long to try to connect, as the server may start
            later than its clients.

    Raises:
        StoreTimeout: no server was there in time.
        StoreAuthenticationError: the server has another secret.
        StoreError: what listens on that port is no store.
    """

    def __init__(self, host: str, port: int, *, secret: bytes | str, timeout: timedelta | float | None = None) -> None:
        super().__init__(timeout)
        self._host = host
        self._port = port
        self._secret = as_secret(secret)
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._owner = os.getpid()
        self._closed = False
        self._put_back(self._connect(Deadline(self._timeout_s)))

    def describe(self) -> str:
        """Address and port of the server."""
        return f"TCP store at {self._host}:{self._port}"

    def set(self, key: str, value: bytes | str) -> None:
        """See `Store.set`."""
        self._call(Op.SET, as_key(key).encode(), as_bytes(value))

    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        """See `Store.get`."""
        return self._call_waiting(Op.GET, [as_key(key)], self._limit_s(timeout))[0]

    def add(self, key: str, amount: int) -> int:
        """See `Store.add`."""
        return int(self._call(Op.ADD, as_key(key).encode(), b"%d" % index(amount))[0])

    def check(self, keys: Sequence[str]) -> bool:
        """See `Store.check`."""
        return self._call(Op.CHECK, *(key.encode() for key in as_keys(keys)))[0] == b"1"

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """See `Store.wait`."""
        self._call_waiting(Op.WAIT, as_keys(keys), self._limit_s(timeout))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """See `Store.compare_set`."""
        return self._call(Op.COMPARE_SET, as_key(key).encode(), as_bytes(expected), as_bytes(desired))[0]

    def delete_key(self, key: str) -> bool:
        """See `Store.delete_key`."""
        return self._call(Op.DELETE_KEY, as_key(key).encode())[0] == b"1"

    def num_keys(self) -> int:
        """See `Store.num_keys`."""
        return int(self._call(Op.NUM_KEYS)[0])

    def close(self) -> None:
        """Hang up. Calls after it are errors; those under way in other threads end as they would have. May be repeated."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def _call(self, op: Op, *fields: bytes) -> list[bytes]:
        return self._exchange(pack(op, *fields), self._timeout_s)[1]

    def _call_waiting(self, op: Op, keys: list[str], timeout_s: float) -> list[bytes]:
        message = pack(op, pack_seconds(timeout_s), *(key.encode() for key in keys))
        status, fields = self._exchange(message, timeout_s + GRACE_S)
        if status == Status.TIMED_OUT:
            raise never_came([field.decode() for field in fields], self.describe(), timeout_s)
        return fields

    def _exchange(self, message: bytes, timeout_s: float) -> tuple[int, list[bytes]]:
        if len(message) > LONGEST_MESSAGE_BYTES:
            raise InvalidArgumentError(
                f"{self.describe()}: a message of {len(message)} bytes, where at most {LONGEST_MESSAGE_BYTES} are allowed; a "
                "store is for addresses and counters, send data through a process group"
            )
        deadline = Deadline(timeout_s)
        channel = self._take(deadline)
        try:
            status, fields = channel.exchange(message, deadline)
        except (OSError, ProtocolError) as error:
            channel.close()
            raise self._broken(error, timeout_s) from error
        except BaseException:  # interrupted: the answer is still to come, and would be taken for that of the next call
            channel.close()
            raise
        self._put_back(channel)
        if status == Status.REFUSED:
            raise InvalidArgumentError(f"{self.describe()}: {fields[0].decode()}")
        return status, fields

    def _broken(self, error: Exception, timeout_s: float) -> StoreError:
        if isinstance(error, TimeoutError):
            return StoreTimeout(f"{self.describe()}: the server did not answer within {timeout_s:g} s; is its process alive?")
        return StoreError(
            f"{self.describe()}: the connection broke ({error}); has the process that serves it ended, or was a value longer "
            "than that server allows?"
        )

    def _take(self, deadline: Deadline) -> Channel:
        with self._lock:
            if self._closed:
                raise StoreError(f"{self.describe()}: this handle was closed; open another")
            if self._owner != os.getpid():  # a fork: the connections belong to the parent
                self._forget_parents()
            if self._idle:
                return self._idle.pop()
        return self._connect(deadline)

    def _forget_parents(self) -> None:
        for channel in self._idle:
            channel.close()  # this process's copy; the parent's goes on
        self._owner, self._idle = os.getpid(), []

    def _put_back(self, channel: Channel) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(channel)
                return
        channel.close()

    def _connect(self, deadline: Deadline) -> Channel:
        """Try until there is a server; an answer that no later attempt can better is an error at once."""
        found: list[Channel] = []
        last: list[OSError] = []

        def attempt() -> bool:
            try:
                found.append(Channel(self._host, self._port, self._secret, deadline))
            except OSError as error:
                last[:] = [error]
            return bool(found)

        try:
            connected = poll(attempt, deadline)
        except ProtocolError as error:
            raise StoreError(f"{self.describe()}: what listens there is no store that we understand: {error}") from error
        if not connected:
            raise StoreTimeout(
                f"{self.describe()}: no server was there within {deadline.timeout_s:g} s (last: {last[0]}); has its process "
                "started, and can this machine reach that address?"
            )
        return found[0]
