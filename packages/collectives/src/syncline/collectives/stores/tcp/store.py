"""`TCPStore`: a handle on the table that a `TCPStoreServer` holds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from ...engine.cancel_scope import CancelScope
from ...errors import InvalidArgumentError, StoreError, StoreTimeout
from ..served import Op, ProtocolError, ServedStore, Status, pack, pack_seconds, unpack
from ..store import as_key, as_keys, key_timeout, poll
from .sockets import LONGEST_MESSAGE_BYTES, as_secret, refuse_wildcard, require_pyzmq

if TYPE_CHECKING:
    from .connection import Connection

GRACE_S = 5.0
"""The server ends waits at their time limits. If an answer is this many seconds late, the client takes the server for dead."""


class TCPStore(ServedStore):
    """A client of a `TCPStoreServer`.

    Each thread has its own connection during a call, so a thread that waits blocks no other thread.

    A call costs one round trip, and six more if the call makes a new connection.

    If the connection breaks during a call, the call fails and is not repeated, because an `add` might count twice. If the
    connection broke between two calls, the next call connects again. If another server then answers, the call fails.

    Args:
        host: address or name of the server.
        port: port of the server.
        secret: the server's secret.
        timeout: seconds or a timedelta; see `Store`. `timeout` also limits how long the constructor waits for the server to
            start.

    Raises:
        InvalidArgumentError: the secret is shorter than 16 bytes, or `host` is a wildcard, such as ``0.0.0.0``.
        StoreTimeout: no server accepted the connection in time.
        StoreAuthenticationError: the server has another secret.
        StoreUnavailableError: pyzmq is missing.
        StoreError: the program at this port is not a store.
    """

    _parents: ClassVar[list[Connection]] = []  # keeps the parent's connections alive in a forked child, for ever

    def __init__(self, host: str, port: int, *, secret: bytes | str, timeout: timedelta | float | None = None) -> None:
        super().__init__(timeout)
        self._host = host
        self._port = port
        self._secret = as_secret(secret)
        refuse_wildcard(host, host)  # servers refuse a wildcard, so do not wait for one
        require_pyzmq()
        self._table_id = b""  # the identity of the server's table; not known before the first answer
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False
        self._keep_idle(self._connect_patiently(CancelScope(self._timeout_s)))

    def describe(self) -> str:
        """Return the kind of the store, with its address and port, in words."""
        return f"TCP store at {self._host}:{self._port}"

    @override
    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        return self._call_waiting(Op.GET, [as_key(key)], self._limit_s(timeout))[0]

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self._call_waiting(Op.WAIT, as_keys(keys), self._limit_s(timeout))

    def clone(self) -> TCPStore:
        """Make another handle on the same table, with its own connections and time limit."""
        return TCPStore(self._host, self._port, secret=self._secret, timeout=self.timeout)

    def close(self) -> None:
        """Close the connections. Later calls raise errors, but calls in flight go on. A second `close` does nothing."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _call(self, op: Op, *fields: bytes) -> list[bytes]:
        return self._exchange(pack(op, *fields), self._timeout_s)[1]

    def _call_waiting(self, op: Op, keys: list[str], timeout_s: float) -> list[bytes]:
        scope, names = CancelScope(timeout_s), [key.encode() for key in keys]
        while True:
            left_s = scope.remaining_s()
            status, fields = self._exchange(pack(op, pack_seconds(left_s), *names), left_s + GRACE_S)
            # The server ends each wait after `LONGEST_WAIT_S`, so ask again.
            if status != Status.TIMED_OUT:
                return fields
            if scope.is_over():
                raise key_timeout([field.decode() for field in fields], self.describe(), timeout_s)

    def _exchange(self, message: bytes, timeout_s: float) -> tuple[int, list[bytes]]:
        if len(message) > LONGEST_MESSAGE_BYTES:
            raise InvalidArgumentError(
                f"{self.describe()}: a message of {len(message)} bytes, where at most {LONGEST_MESSAGE_BYTES} are allowed; a "
                "store is for addresses and counters, send data through a process group"
            )
        scope = CancelScope(timeout_s)
        connection = self._take(scope)
        try:
            table_id, answer = connection.exchange(self._table_id, message, scope)
        except OSError as error:
            connection.close()
            raise self._broken(error, timeout_s) from error
        except BaseException:  # interrupted: the answer would arrive later, and be taken for the answer to the next call
            connection.close()
            raise
        self._keep_idle(connection)
        return self._checked(table_id, *unpack(answer))

    def _checked(self, table_id: bytes, status: int, fields: list[bytes]) -> tuple[int, list[bytes]]:
        if status == Status.OTHER_TABLE:
            raise StoreError(
                f"{self.describe()}: another server listens there than before, and does not have what was stored; the process "
                "that served this store has ended"
            )
        if status == Status.REFUSED:
            raise InvalidArgumentError(f"{self.describe()}: {fields[0].decode()}")
        # From the first answer on, another server at this address is recognised by its table.
        self._table_id = table_id
        return status, fields

    def _broken(self, error: Exception, timeout_s: float) -> StoreError:
        if isinstance(error, TimeoutError):
            return StoreTimeout(
                f"{self.describe()}: the server did not answer within {timeout_s:g} s (timeout); is its process alive?"
            )
        return StoreError(
            f"{self.describe()}: the connection broke ({error}); has the process that serves it ended? Whether this call was "
            "carried out is not known"
        )

    def _take(self, scope: CancelScope) -> Connection:
        with self._lock:
            if self._closed:
                raise StoreError(f"{self.describe()}: this handle was closed; open another")
            while self._idle:
                connection = self._idle.pop()
                if connection.is_open():
                    return connection
                connection.close()
        try:
            return self._connect(scope)
        except OSError as error:
            raise self._broken(error, scope.timeout_s) from error

    @override
    def _in_fork(self) -> None:
        self._lock = threading.Lock()
        # Put the parent's connections aside. Not even their destructors may run here.
        self._parents.extend(self._idle)
        self._idle = []

    def _keep_idle(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        # The handle was closed during the call, so nobody else would close this connection.
        connection.close()

    def _connect_patiently(self, scope: CancelScope) -> Connection:
        """Try to connect until a server answers. Raise an error at once if waiting cannot help, such as for a wrong secret."""
        found: list[Connection] = []
        last: list[OSError] = []

        def attempt() -> bool:
            try:
                found.append(self._connect(scope))
            except OSError as error:
                # Perhaps the server starts later. Errors of other kinds end the wait.
                last[:] = [error]
            return bool(found)

        if not poll(attempt, scope):
            raise StoreTimeout(
                f"{self.describe()}: no server was there within {scope.timeout_s:g} s (last: {last[0]}; timeout); "
                "has its process started, and can this machine reach that address?"
            )
        return found[0]

    def _connect(self, scope: CancelScope) -> Connection:
        from .connection import Connection, HungUpError, other_secret

        try:
            try:
                return Connection(self._host, self._port, self._secret, scope)
            except HungUpError:
                return Connection(self._host, self._port, self._secret, scope)
        # Two hang-ups mean another secret. A server that was about to end hangs up only once: at the second try nobody
        # listens.
        except HungUpError as error:
            raise other_secret(self.describe()) from error
        except ProtocolError as error:
            raise StoreError(
                f"{self.describe()}: the program that listens there does not answer as a store of this version of Syncline: "
                f"{error}\nIf it is another program, give another port"
            ) from error
