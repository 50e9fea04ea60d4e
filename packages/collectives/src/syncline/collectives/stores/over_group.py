"""GroupStore: a table on rank 0 of a process group, which the other ranks reach by send and receive. No port is opened."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from typing_extensions import override

from ..engine.call import CancelScope
from ..errors import InvalidArgumentError, StoreError, SynclineError
from ..group import ProcessGroup
from ..work import Work
from .served import Op, ServedStore, Service, Status, pack, pack_seconds, unpack
from .store import as_key, as_keys, key_timeout, poll

logger = logging.getLogger("syncline.collectives")

# Messages on the group: the length of a request and then the request, the length of an answer and then the answer.
_ASK_LENGTH, _ASK, _ANSWER_LENGTH, _ANSWER = 1, 2, 3, 4
_GOODBYE = -1  # in place of a length: this rank asks no more
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 2e-4, 2e-2
_GOODBYES_S = 5.0


class GroupStore(ServedStore):
    """A store for the ranks of a group that has no other use.

    Rank 0 serves the others from a thread that looks for requests every 0.2 ms to 20 ms; the interval grows while no request
    comes. A call costs four messages, on rank 0 none. A call that waits for a key repeats its request.

    Args:
        group: its ranks share the store; all of them make one, and close it. The store closes the group.
        timeout: seconds or a timedelta; see `Store`.
    """

    def __init__(self, group: ProcessGroup, timeout: timedelta | float | None = None) -> None:
        super().__init__(timeout)
        self._group = group
        self._asking = threading.Lock()
        self._closed = False
        self._server = _Server(group) if group.rank == 0 else None

    def describe(self) -> str:
        """The group."""
        return f"store on rank 0 of group '{self._group.name}'"

    @override
    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        scope = CancelScope(self._limit_s(timeout))
        name, value = as_key(key), list[bytes]()

        def ask() -> bool:
            status, fields = self._exchange(pack(Op.GET, pack_seconds(0.0), name.encode()))
            value[:] = fields
            return status == Status.DONE

        if not poll(ask, scope):
            raise key_timeout([name], self.describe(), scope.timeout_s)
        return value[0]

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        scope, names = CancelScope(self._limit_s(timeout)), as_keys(keys)
        if not poll(lambda: self.check(names), scope):
            raise key_timeout((key for key in names if not self.check([key])), self.describe(), scope.timeout_s)

    def close(self) -> None:
        """Say goodbye to rank 0, which waits for that of all ranks, a few seconds at most; close the group. May be repeated."""
        with self._asking:
            if self._closed:
                return
            self._closed = True
            if self._server is not None:
                everybody_left = self._server.stop()
            else:
                self._group.send(torch.tensor([_GOODBYE]), 0, _ASK_LENGTH, async_op=True).wait(_GOODBYES_S)
                everybody_left = True
        if everybody_left:
            self._group.close()
        else:
            self._group.abort()

    def _call(self, op: Op, *fields: bytes) -> list[bytes]:
        return self._exchange(pack(op, *fields))[1]

    def _exchange(self, message: bytes) -> tuple[int, list[bytes]]:
        with self._asking:
            if self._closed:
                raise StoreError(f"{self.describe()}: it was closed")
            status, fields = unpack(self._ask(message) if self._server is None else self._server.answer(0, message))
        if status == Status.REFUSED:
            raise InvalidArgumentError(f"{self.describe()}: {fields[0].decode()}")
        return status, fields

    def _ask(self, message: bytes) -> bytes:
        self._group.send(torch.tensor([len(message)]), 0, _ASK_LENGTH)
        self._group.send(_as_tensor(message), 0, _ASK)
        length = torch.zeros(1, dtype=torch.int64)
        self._group.recv(length, 0, _ANSWER_LENGTH)
        return _received(self._group, int(length), 0, _ANSWER)


class _Server:
    """Rank 0's table, and the thread that answers the other ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._service: Service[int] = Service()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._present = group.size - 1
        self._thread = threading.Thread(target=self._serve, name=f"syncline-store-{group.name}", daemon=True)
        if self._present:
            self._thread.start()

    def answer(self, client: int, message: bytes) -> bytes:
        """Carry out one request."""
        with self._lock:
            ((_, reply),) = self._service.request(client, message, time.monotonic())
            return reply

    def stop(self) -> bool:
        """Wait until all other ranks have said goodbye; false if some have not after a few seconds."""
        if self._thread.is_alive():
            self._thread.join(_GOODBYES_S)
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        return self._present == 0

    def _serve(self) -> None:
        """Where the group fails, the others' calls shall fail as well, at once, and not wait for an answer."""
        try:
            self._answer_all()
        except SynclineError as error:
            logger.warning("the store on rank 0 of group '%s' answers no more: %s", self._group.name, error)
            self._group.abort()

    def _answer_all(self) -> None:
        while self._present and not self._stopping.is_set():
            length = torch.zeros(1, dtype=torch.int64)
            work = self._group.recv(length, None, _ASK_LENGTH, async_op=True)
            if not self._arrives(work):
                return
            work.wait()  # it is over; it may have failed
            client = work.source_rank()
            assert client is not None
            if int(length) == _GOODBYE:
                self._present -= 1
                continue
            reply = self.answer(client, _received(self._group, int(length), client, _ASK))
            self._group.send(torch.tensor([len(reply)]), client, _ANSWER_LENGTH)
            self._group.send(_as_tensor(reply), client, _ANSWER)

    def _arrives(self, work: Work) -> bool:
        """Wait, with pauses that grow; false if the server was stopped."""
        pause_s = _SHORTEST_PAUSE_S
        while not work.is_completed():
            if self._stopping.wait(pause_s):
                return False
            pause_s = min(1.1 * pause_s, _LONGEST_PAUSE_S)
        return True


def _received(group: ProcessGroup, length: int, src: int, tag: int) -> bytes:
    tensor = torch.zeros(length, dtype=torch.uint8)
    group.recv(tensor, src, tag)
    return bytes(tensor.tolist())


def _as_tensor(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
