"""Exchange messages between ranks over the host, without NCCL."""

from __future__ import annotations

import itertools
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

from ...engine.cancel_scope import CancelScope
from ...engine.host_group import HostGroup
from ...engine.tags import FIRST_NCCL_AGREEMENT, NCCL_AGREEMENTS, ReservedTag
from ...errors import RankLostError, TransportError, in_words, with_details
from ...group import ProcessGroup
from ...health.agreement import Carrier
from ...health.statements import MOST_TOLD, Statements
from ...tensors.layout import contents

Payload: TypeAlias = dict[str, Any]
# The key of an error message that is sent in place of a decision.
_COULD_NOT = "could not decide"
# The pauses between two checks for a key: short at first, then longer and longer. We do not use torch's `wait`: during a wait,
# the store answers no other thread, and nothing can interrupt the wait.
_FIRST_PAUSE_S = 0.5e-3
_LONGEST_PAUSE_S = 0.05
# The seconds between two checks of the time limit, in a thread that waits while another thread receives.
_LOOK_S = 0.1


class Rendezvous(ABC):
    """Lets some ranks agree on a decision. Each agreement has a topic.

    Each rank passes a payload, which is a dictionary that can be written as JSON. From all payloads, the first rank makes the
    decision, which is a payload, too. All ranks get the decision.
    """

    def agree(
        self,
        topic: str,
        ranks: Sequence[int],
        rank: int,
        payload: Payload,
        decide: Callable[[list[Payload]], Payload],
        scope: CancelScope,
    ) -> Payload:
        """Agree on a decision. All of `ranks` call this method. Several threads of a rank may use different topics at once.

        Args:
            topic: the name of the agreement. Each agreement needs a new name.
            ranks: the ranks that agree, as ranks in the job.
            rank: this process's rank in the job.
            payload: this process's payload.
            decide: makes the decision from all payloads, in the order of `ranks`. Only the first rank calls it.
            scope: the time limit.

        Raises:
            TransportError: a rank did not come in time, or the first rank could not decide.
            BaseException: the reason with which the scope was cancelled.
        """
        leader, *others = ranks
        if rank != leader:
            self.send(topic, leader, rank, payload, scope)
            decision = self.recv(topic, rank, leader, scope)
            if _COULD_NOT in decision:
                raise TransportError(f"rank {leader} came to '{topic}', but failed there: {decision[_COULD_NOT]}")
            return decision
        received = [payload, *(self.recv(topic, leader, other, scope) for other in others)]
        try:
            decision = decide(received)
        except Exception as error:
            # The others wait for a decision, so they must hear why there is none.
            for other in others:
                self.send(topic, other, leader, {_COULD_NOT: in_words(error)}, scope)
            raise
        for other in others:
            self.send(topic, other, leader, decision, scope)
        return decision

    @abstractmethod
    def send(self, topic: str, to: int, sender: int, payload: Payload, scope: CancelScope) -> None:
        """Send a payload to a rank."""

    def recv(self, topic: str, to: int, sender: int, scope: CancelScope) -> Payload:
        """Wait for a rank's payload.

        Raises:
            TransportError: the payload did not come in time.
            BaseException: `scope` was cancelled with this error.
        """
        try:
            return self._receive(topic, to, sender, scope)
        except Exception as error:
            # If the scope was cancelled, the error is the reason that was given. Raise it unchanged.
            if error is scope.reason:
                raise
            raise TransportError(
                with_details(
                    f"rank {sender} did not come to '{topic}' within {scope.timeout_s:g} s: {error}",
                    "NCCL connects at the first collective on a GPU, and all ranks of a group must issue the same; look for a "
                    "rank that died, or that has no GPU",
                )
            ) from error

    @abstractmethod
    def _receive(self, topic: str, to: int, sender: int, scope: CancelScope) -> Payload: ...

    @abstractmethod
    def announce(self, name: str, failure: str) -> None:
        """Tell the other ranks of the group `name` that the group has failed on this rank. This method may block."""

    @abstractmethod
    def announced(self, name: str, ranks: Sequence[int]) -> str | None:
        """Return an error text if another rank of the group `name` has failed; else None. `ranks` are its ranks in the job."""

    @property
    def group(self) -> ProcessGroup | None:
        """The host group that the ranks use to meet; None if they use a store."""
        return None

    @property
    def owns_group(self) -> bool:
        """Whether this rendezvous must close `group`, because no other code uses it."""
        return False

    def close(self) -> None:
        """Close the host group if this rendezvous owns it."""
        if self.group is not None and self.owns_group:
            self.group.close()

    def abort(self) -> None:
        """Abort the host group, without waiting, if this rendezvous owns it."""
        if self.group is not None and self.owns_group:
            self.group.abort()


class StoreRendezvous(Rendezvous):
    """Sends payloads as values of a store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    @override
    def send(self, topic: str, to: int, sender: int, payload: Payload, scope: CancelScope) -> None:
        self._store.set(f"{topic}/{sender}-{to}", json.dumps(payload))

    def _receive(self, topic: str, to: int, sender: int, scope: CancelScope) -> Payload:
        key, pause_s = f"{topic}/{sender}-{to}", _FIRST_PAUSE_S
        while not self._store.check([key]):
            scope.check(f"there is no key '{key}' in the store")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        received: Payload = json.loads(self._store.get(key))
        self._store.delete_key(key)  # only this rank reads the key; if keys stayed, each step would add some
        return received

    @override
    def announce(self, name: str, failure: str) -> None:
        if self.announced(name, ()) is None:  # keep the first failure: later ones only follow from it
            self._store.set(f"{name}/failed", failure)

    @override
    def announced(self, name: str, ranks: Sequence[int]) -> str | None:
        key = f"{name}/failed"
        return self._store.get(key).decode() if self._store.check([key]) else None


class GroupRendezvous(Rendezvous):
    """Sends payloads as messages of a host group, such as an MPI group. A rank's number in the job is its rank in this group.

    Args:
        group: the host group. This class uses only `send` and `recv`, which do not change the order of collectives.
        owned: whether this object closes the group at the end.
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

    @override
    def announce(self, name: str, failure: str) -> None:
        """Do nothing, because the host group itself finds out which ranks are lost."""

    @override
    def announced(self, name: str, ranks: Sequence[int]) -> str | None:
        lost = self._group.reason_to_give_up() if isinstance(self._group, HostGroup) else None
        # Give up only if the lost rank is in this group.
        return str(lost) if isinstance(lost, RankLostError) and not set(lost.ranks).isdisjoint(ranks) else None

    def send(self, topic: str, to: int, sender: int, payload: Payload, scope: CancelScope) -> None:
        """Send two messages: the number of bytes (int64), then the payload as a JSON text (uint8)."""
        text = json.dumps({"topic": topic, "payload": payload}).encode()
        length = torch.tensor([len(text)], dtype=torch.int64, device="cpu")
        with self._lock:
            sending = self._sending[to, _tag(topic)]
        with sending:  # no other message with this tag may come between length and text
            for message in (length, torch.frombuffer(bytearray(text), dtype=torch.uint8)):
                self._group.send(message, to, _tag(topic), async_op=True).wait(max(scope.remaining_s(), 1e-3))

    def _receive(self, topic: str, to: int, sender: int, scope: CancelScope) -> Payload:
        """Wait for the payload of `topic`. Keep payloads of other topics with the same tag for other threads."""
        with self._lock:
            inbox = self._inboxes.setdefault((sender, _tag(topic)), _Inbox())
        return inbox.take(topic, lambda: self._receive_next(sender, _tag(topic), scope), scope)

    def _receive_next(self, sender: int, tag: int, scope: CancelScope) -> Payload:
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._receive_into(length, sender, tag, scope)
        message = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        self._receive_into(message, sender, tag, scope)
        received: Payload = json.loads(bytes(contents(message)))
        return received

    def _receive_into(self, tensor: torch.Tensor, sender: int, tag: int, scope: CancelScope) -> None:
        # Wait only once, for the whole time limit: Gloo breaks all its connections when a wait for a message times out.
        self._group.recv(tensor, sender, tag, async_op=True).wait(max(scope.remaining_s(), 1e-3))


class _Inbox:
    """The messages from one rank with one tag. Topics may share a tag."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._payloads: dict[str, Payload] = {}
        self._is_receiving = False

    def take(self, topic: str, receive_next: Callable[[], Payload], scope: CancelScope) -> Payload:
        """Wait for the payload of a topic. One thread at a time receives, for all waiting threads."""
        while True:
            with self._condition:
                while topic not in self._payloads and self._is_receiving:
                    scope.check(f"nothing of '{topic}' has come")
                    self._condition.wait(min(max(scope.remaining_s(), 1e-3), _LOOK_S))
                if topic in self._payloads:
                    return self._payloads.pop(topic)
                self._is_receiving = True
            received = None
            try:
                received = receive_next()
            finally:
                # Do this also after an error, so that another thread can receive instead.
                with self._condition:
                    self._is_receiving = False
                    if received is not None:
                        self._payloads[received["topic"]] = received["payload"]
                    self._condition.notify_all()


def _tag(topic: str) -> ReservedTag:
    return ReservedTag(FIRST_NCCL_AGREEMENT + crc32(topic.encode()) % NCCL_AGREEMENTS)


class RendezvousCarrier(Carrier):
    """Exchanges numbers and texts between the ranks, by `Connector.agree`.

    Cost: each rank except the first sends one message to the first rank, and receives one message from it.
    """

    def __init__(self, agree: Callable[[str, Payload, Callable[[list[Payload]], Payload], CancelScope], Payload]) -> None:
        self._agree = agree
        self._numbers = itertools.count()

    def maximum(self, numbers: Sequence[int], scope: CancelScope) -> list[int]:
        """See `Carrier.maximum`. If a rank does not come in time, raise a `TransportError`."""

        def largest(said: list[Payload]) -> Payload:
            return {"numbers": [max(column) for column in zip(*(entry["numbers"] for entry in said), strict=True)]}

        return list(self._agree(self._topic(), {"numbers": list(numbers)}, largest, scope)["numbers"])

    def statements(self, text: str, scope: CancelScope, *, most_told: int | None = MOST_TOLD) -> Statements:
        """See `Carrier.statements`."""

        def together(said: list[Payload]) -> Payload:
            return {"packed": Statements.of([entry["text"] for entry in said]).packed(most_told)}

        said = Statements()
        said.add_packed(self._agree(self._topic(), {"text": text}, together, scope)["packed"])
        return said

    def _topic(self) -> str:
        return f"comparison {next(self._numbers)}"
