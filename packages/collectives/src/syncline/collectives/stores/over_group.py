"""`GroupStore`: a table on rank 0 of a process group. The other ranks use it through send and receive, without a port."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from typing_extensions import override

from ..engine.cancel_scope import CancelScope
from ..errors import InvalidArgumentError, StoreError, SynclineError
from ..forks import not_the_rank
from ..group import ProcessGroup
from ..work import Work
from .served import Op, ServedStore, Service, Status, pack, pack_seconds, unpack
from .store import as_key, as_keys, key_timeout, poll

logger = logging.getLogger("syncline.collectives")

# The tags of the four kinds of messages: the length of a request, the request, the length of an answer, and the answer.
_ASK_LENGTH, _ASK, _ANSWER_LENGTH, _ANSWER = 1, 2, 3, 4
_GOODBYE = -1  # a rank that will not ask again sends this number in place of a length
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 2e-4, 2e-2
_LOOKS_SHARE = 20  # with many ranks a check takes long, so the server pauses at least 20 times as long as a check
_GOODBYES_S = 5.0
_STOP_S = 1.0


class GroupStore(ServedStore):
    """A store for the ranks of a group. The program must not use the group for anything else.

    A thread on rank 0 checks for requests of the other ranks every 0.2 ms to 20 ms, and with many ranks less often.

    A call costs four messages; a call on rank 0 costs none. A call that waits for a key repeats its request.

    The `timeout` of a call limits how long the call waits for a key. If rank 0 is too busy to answer a request, the call waits
    longer, up to the group's time limit. After this limit the rank cannot use the store any more, because a late answer could
    be taken for the answer to another call.

    In a forked child of a rank, every call raises a `GroupClosedError`, because only the rank itself communicates.

    Args:
        group: the group whose ranks share the store. All ranks must make a `GroupStore`, and all must call `close`. `close`
            also closes the group.
        timeout: seconds or a timedelta; see `Store`.
    """

    def __init__(self, group: ProcessGroup, timeout: timedelta | float | None = None) -> None:
        super().__init__(timeout)
        self._group = group
        self._client = _Client()
        self._pid = os.getpid()
        self._server = _Server(group) if group.rank == 0 else None

    def describe(self) -> str:
        """Return the kind of the store, and its group, in words."""
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
        """Tell rank 0 that this rank will send no more requests, and close the group. A second call does nothing.

        Rank 0 waits a few seconds at most until all other ranks have called `close`. The method aborts the group in three
        cases: a rank does not call `close` in time, rank 0 is gone, or an earlier call on this rank ended before its answer
        came. In a forked child, `close` does nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._client.asking:
            if self._client.is_closed:
                return
            self._client.is_closed = True
            if self._server is not None:
                everybody_left = self._server.stop()
            elif self._client.has_lost_an_answer:
                everybody_left = False  # rank 0 may wait for the rest of the request
            else:
                try:
                    self._group.send(torch.tensor([_GOODBYE], device="cpu"), 0, _ASK_LENGTH, async_op=True).wait(_GOODBYES_S)
                    everybody_left = True
                except SynclineError:  # rank 0 is gone, or the group failed before
                    everybody_left = False
        if everybody_left:
            self._group.close()
        else:
            # A rank has not left, or is lost. An orderly close would wait for this rank.
            self._group.abort()

    def _call(self, op: Op, *fields: bytes) -> list[bytes]:
        return self._exchange(pack(op, *fields))[1]

    def _exchange(self, message: bytes) -> tuple[int, list[bytes]]:
        # A forked child of rank 0 has a copy of the table, which the other ranks do not see.
        if os.getpid() != self._pid:
            raise not_the_rank("a call of a GroupStore", self._group.place())
        with self._client.asking:
            if self._client.is_closed:
                raise StoreError(f"{self.describe()}: it was closed")
            if self._client.has_lost_an_answer:
                raise StoreError(
                    f"{self.describe()}: an earlier call on this rank ended before its answer came (a time limit, or Ctrl-C), "
                    "so later answers could be those of other calls; make a new group and a store over it"
                )
            status, fields = unpack(self._ask(message) if self._server is None else self._server.answer(0, message))
        if status == Status.REFUSED:
            raise InvalidArgumentError(f"{self.describe()}: {fields[0].decode()}")
        return status, fields

    def _ask(self, message: bytes) -> bytes:
        # Reset below if there is no error. After an error, a late answer would be taken for the answer to the next call.
        self._client.has_lost_an_answer = True
        self._group.send(torch.tensor([len(message)], device="cpu"), 0, _ASK_LENGTH)
        self._group.send(_as_tensor(message), 0, _ASK)
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._group.recv(length, 0, _ANSWER_LENGTH)
        answer = _received(self._group, int(length), 0, _ANSWER)
        self._client.has_lost_an_answer = False
        return answer


class _Client:
    """The state that a `GroupStore` shares with its clones, because the messages of all of them go through one group.

    Attributes:
        asking: a lock, held during a request and its answer.
        is_closed: whether one of the stores, and so the group, was closed.
        has_lost_an_answer: whether a call ended before its answer came.
    """

    def __init__(self) -> None:
        self.asking = threading.Lock()
        self.is_closed = False
        self.has_lost_an_answer = False


class _Server:
    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._service: Service[int] = Service()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._present = group.size - 1
        self._thread = threading.Thread(target=self._serve, name=f"syncline-store-{group.name}", daemon=True)
        # In a group of one rank, no other rank asks.
        if self._present:
            self._thread.start()

    def answer(self, client: int, message: bytes) -> bytes:
        with self._lock:
            ((_, reply),) = self._service.request(client, message, time.monotonic())
            return reply

    def stop(self) -> bool:
        """Wait a few seconds for the other ranks to close their stores, then end the thread. Return whether all have closed."""
        if self._thread.is_alive():
            self._thread.join(_GOODBYES_S)
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        # The thread still waits for the rest of a request, because Ctrl-C has ended the call of another rank. Abort the group,
        # as `close` does later in this case. Over Gloo the thread may still wait after that, so join it with a time limit.
        if self._thread.is_alive():
            self._group.abort()
            self._thread.join(_STOP_S)
        return self._present == 0

    def _serve(self) -> None:
        try:
            self._answer_all()
        except SynclineError as error:
            logger.warning("the store on rank 0 of group '%s' answers no more: %s", self._group.name, error)
            # Let the calls of other ranks fail at once instead of waiting.
            self._group.abort()

    def _answer_all(self) -> None:
        """Answer requests until all other ranks have closed their stores, or `stop` is called.

        Note [A receive for each rank]
        ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
        The server starts one receive for each rank. With MPICH 5.0.2 over UCX, a receive from any rank (MPI_ANY_SOURCE) loses
        messages from other nodes while another thread communicates.
        """
        awaited = {client: self._await(client) for client in range(1, self._group.size)}
        pause_s = _SHORTEST_PAUSE_S
        while awaited:
            looked_s = time.perf_counter()
            asking = [client for client, (work, _) in awaited.items() if work.is_completed()]
            looked_s = time.perf_counter() - looked_s
            for client in asking:
                work, length = awaited.pop(client)
                work.wait()  # the receive is over; `wait` raises if the receive has failed
                if int(length) == _GOODBYE:
                    # This rank asks no more, so start no other receive for it.
                    self._present -= 1
                    continue
                reply = self.answer(client, _received(self._group, int(length), client, _ASK))
                self._group.send(torch.tensor([len(reply)], device="cpu"), client, _ANSWER_LENGTH)
                self._group.send(_as_tensor(reply), client, _ANSWER)
                awaited[client] = self._await(client)
            pause_s = _SHORTEST_PAUSE_S if asking else min(1.1 * pause_s, _LONGEST_PAUSE_S)
            if self._stopping.wait(max(pause_s, _LOOKS_SHARE * looked_s)):
                return

    def _await(self, client: int) -> tuple[Work, torch.Tensor]:
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        return self._group.recv(length, client, _ASK_LENGTH, async_op=True), length


def _received(group: ProcessGroup, length: int, src: int, tag: int) -> bytes:
    tensor = torch.zeros(length, dtype=torch.uint8, device="cpu")
    group.recv(tensor, src, tag)
    return bytes(tensor.tolist())


def _as_tensor(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
