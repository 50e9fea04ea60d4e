"""Where ranks meet on the host before NCCL connects them."""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from zlib import crc32

import torch
import torch.distributed as dist
from typing_extensions import override

from ...contract.deadline import Deadline
from ...contract.layout import contents
from ...contract.process_group import ProcessGroup
from ...contract.reserved_tags import FIRST_NCCL_AGREEMENT, NCCL_AGREEMENTS, ReservedTag
from ...errors import CollectiveTimeout, TransportError
from ...failures.report import Reporter
from ...host.host_group import HostGroup

Payload: TypeAlias = dict[str, Any]
# In place of a decision: why there is none.
_COULD_NOT = "could not decide"
# How often a store is asked for a key: at once, then less and less often. In its own `wait` a store of torch answers no other
# thread, and cannot be interrupted.
_FIRST_PAUSE_S = 0.5e-3
_LONGEST_PAUSE_S = 0.05


class Rendezvous(ABC):
    """Lets some ranks agree on something, once for each topic.

    The first of the ranks receives the payloads of all and decides; all get its decision. Payloads are what JSON can hold.
    """

    def agree(
        self,
        topic: str,
        ranks: Sequence[int],
        rank: int,
        payload: Payload,
        decide: Callable[[list[Payload]], Payload],
        deadline: Deadline,
    ) -> Payload:
        """Meet. All of `ranks` call it, in any order with other topics.

        Args:
            topic: names the agreement; used once.
            ranks: who meets, as ranks of the job.
            rank: who this process is.
            payload: what it says.
            decide: called on the first rank with the payloads of all, in the order of `ranks`.
            deadline: for the whole.

        Raises:
            TransportError: a rank did not come in time, or the first could not decide.
        """
        leader, *others = ranks
        if rank != leader:
            self.send(topic, leader, rank, payload, deadline)
            decision = self.recv(topic, rank, leader, deadline)
            if _COULD_NOT in decision:
                raise TransportError(f"rank {leader} came to '{topic}', but failed there: {decision[_COULD_NOT]}")
            return decision
        received = [payload, *(self.recv(topic, leader, other, deadline) for other in others)]
        try:
            decision = decide(received)
        except Exception as error:
            self._send_all(topic, others, leader, {_COULD_NOT: str(error)}, deadline)
            raise
        self._send_all(topic, others, leader, decision, deadline)
        return decision

    def _send_all(self, topic: str, others: Sequence[int], leader: int, payload: Payload, deadline: Deadline) -> None:
        for other in others:
            self.send(topic, other, leader, payload, deadline)

    @abstractmethod
    def send(self, topic: str, to: int, sender: int, payload: Payload, deadline: Deadline) -> None:
        """Leave a payload for a rank."""

    @abstractmethod
    def recv(self, topic: str, to: int, sender: int, deadline: Deadline) -> Payload:
        """Wait for a rank's payload."""

    @property
    def group(self) -> ProcessGroup | None:
        """The group in which they meet; None if it is none."""
        return None

    @property
    def owns_group(self) -> bool:
        """Whether nobody else uses that group."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Give up what it holds."""

    @abstractmethod
    def abort(self) -> None:
        """The same without waiting for anybody."""


class StoreRendezvous(Rendezvous):
    """Payloads are values of a store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def send(self, topic: str, to: int, sender: int, payload: Payload, deadline: Deadline) -> None:
        """Set a key."""
        self._store.set(f"{topic}/{sender}-{to}", json.dumps(payload))

    def recv(self, topic: str, to: int, sender: int, deadline: Deadline) -> Payload:
        """Wait for the key."""
        key = f"{topic}/{sender}-{to}"
        try:
            self._wait(key, deadline)
            received: Payload = json.loads(self._store.get(key))
            self._store.delete_key(key)  # nobody else reads it, and a job compares its calls in every step
        except Exception as error:
            raise _did_not_come(topic, sender, deadline, error) from error
        return received

    def _wait(self, key: str, deadline: Deadline) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._store.check([key]):
            if deadline.expired():
                raise TimeoutError(f"there is no key '{key}' in the store")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Nothing: the store goes with its last user."""

    def abort(self) -> None:
        """Nothing."""


class GroupRendezvous(Rendezvous):
    """Payloads are messages of a host group, such as MPI's, of the same ranks.

    Args:
        group: only its `send` and `recv` are used, which have no place in the order of its collectives.
        owned: whether to close it at the end.
    """

    def __init__(self, group: ProcessGroup, *, owned: bool) -> None:
        self._group = group
        self._owned = owned
        self._lock = threading.Lock()
        self._inboxes: dict[tuple[int, int], _Inbox] = {}
        self._sending: defaultdict[tuple[int, int], threading.Lock] = defaultdict(threading.Lock)

    @property
    @override
    def group(self) -> ProcessGroup:
        return self._group

    @property
    @override
    def owns_group(self) -> bool:
        return self._owned

    @property
    def reporter(self) -> Reporter | None:
        """Who reports the failures of the host group."""
        return self._group.reporter if isinstance(self._group, HostGroup) else None

    def send(self, topic: str, to: int, sender: int, payload: Payload, deadline: Deadline) -> None:
        """Send the length, then the text."""
        text = json.dumps({"topic": topic, "payload": payload}).encode()
        length = torch.tensor([len(text)], dtype=torch.int64, device="cpu")
        with self._lock:
            sending = self._sending[to, _tag(topic)]
        with sending:  # the two belong together
            for message in (length, torch.frombuffer(bytearray(text), dtype=torch.uint8)):
                self._group.send(message, to, _tag(topic), async_op=True).wait(max(deadline.remaining_s(), 1e-3))

    def recv(self, topic: str, to: int, sender: int, deadline: Deadline) -> Payload:
        """Receive both. What has the same tag, but another topic, is kept for the thread that asks for it."""
        tag = _tag(topic)
        with self._lock:
            inbox = self._inboxes.setdefault((sender, tag), _Inbox())
        try:
            return inbox.take(topic, lambda: self._receive_next(sender, tag, deadline), deadline)
        except TransportError as error:
            raise _did_not_come(topic, sender, deadline, error) from error

    def close(self) -> None:
        """Close the group if it is ours."""
        if self._owned:
            self._group.close()

    def abort(self) -> None:
        """Abort the group if it is ours."""
        if self._owned:
            self._group.abort()

    def _receive_next(self, sender: int, tag: int, deadline: Deadline) -> Payload:
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._receive(length, sender, tag, deadline)
        message = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        self._receive(message, sender, tag, deadline)
        received: Payload = json.loads(bytes(contents(message)))
        return received

    def _receive(self, into: torch.Tensor, sender: int, tag: int, deadline: Deadline) -> None:
        self._group.recv(into, sender, tag, async_op=True).wait(max(deadline.remaining_s(), 1e-3))


class _Inbox:
    """What one rank sends under one tag: topics may share a tag, and threads ask for several topics at a time."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._payloads: dict[str, Payload] = {}
        self._is_receiving = False

    def take(self, topic: str, receive_next: Callable[[], Payload], deadline: Deadline) -> Payload:
        """The payload of a topic. One thread at a time receives, for all."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: topic in self._payloads or not self._is_receiving, deadline.remaining_s())
                if topic in self._payloads:
                    return self._payloads.pop(topic)
                if self._is_receiving:
                    raise CollectiveTimeout(f"nothing of '{topic}' has come within {deadline.timeout_s:g} s")
                self._is_receiving = True
            received = None
            try:
                received = receive_next()
            finally:
                with self._condition:
                    self._is_receiving = False
                    if received is not None:
                        self._payloads[received["topic"]] = received["payload"]
                    self._condition.notify_all()


def _tag(topic: str) -> ReservedTag:
    return ReservedTag(FIRST_NCCL_AGREEMENT + crc32(topic.encode()) % NCCL_AGREEMENTS)


def _did_not_come(topic: str, sender: int, deadline: Deadline, error: Exception) -> TransportError:
    return TransportError(
        f"rank {sender} did not come to '{topic}' within {deadline.timeout_s:g} s: {error}. NCCL connects at the first "
        "collective on a GPU, and all ranks of a group must issue the same; look for a rank that died, or that has no GPU"
    )
