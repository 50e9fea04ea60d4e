"""StoreReconnector: after a loss, the members of a group meet again in the store in which they met at the start."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence

from typing_extensions import override

from ..engine.call import Call, Signature
from ..engine.cancel_scope import CancelScope
from ..engine.transport import Transport
from ..errors import TransportError
from ..stores import PrefixStore, Store
from .join_queue import JoinQueue
from .membership_vote import MembershipVote, Newcomers, nobody
from .reconnector import MOST_ATTEMPTS, Generation, Reconnector

logger = logging.getLogger("syncline.collectives")

CONNECT_S = 15.0
"""If the members of a new generation have not connected after this time, in seconds, they vote again."""

_MOST_ALARM_BYTES = 2000


class StoreReconnector(Reconnector):
    """Lets the survivors agree on the members of the next group by a `MembershipVote`. The subclass of a backend connects them.

    See Note [Who is left] in `membership_vote`.

    Args:
        store: a store that all members can reach, and that outlives each of them.
        generation: the group's current generation.
        first_size: how many members the first generation has.
    """

    def __init__(self, store: Store, generation: Generation, first_size: int) -> None:
        super().__init__(generation)
        self.store = store
        self._join_queue = JoinQueue(store, first_size)

    @abstractmethod
    def has_ended(self, member: int) -> bool:
        """Whether a member has certainly ended; false if this is not known."""

    def is_running(self, member: int) -> bool:  # noqa: ARG002 - a subclass that can find this out overrides the method
        """Whether a member certainly runs and is not stopped; false if this is not known."""
        return False

    @abstractmethod
    def connect(self, generation: Generation, timeout_s: float) -> Transport:
        """Connect the members of a generation. All these members call this method.

        Raises:
            TransportError: members did not come within `timeout_s` seconds, or a member has ended.
        """

    @override
    def raise_alarm(self, generation: Generation, why: str) -> None:
        """See `Reconnector.raise_alarm`. Only the first alarm is stored."""
        # A newcomer that waits is alone in its group.
        if generation.is_waiting:
            return
        self._keys(generation).compare_set("alarm", b"", why.encode()[:_MOST_ALARM_BYTES])

    @override
    def alarm(self, generation: Generation) -> str | None:
        if generation.is_waiting:
            return None
        keys = self._keys(generation)
        return keys.get("alarm").decode(errors="replace") if keys.check(["alarm"]) else None

    @override
    def missing_for_admit(self) -> str | None:
        return self.missing()

    @override
    def newcomers(self) -> Sequence[int]:
        return [number for number in self._join_queue.waiting() if not self.has_ended(number)]

    @override
    def shrink(self, silence_timeout_s: float) -> Transport:
        return self._meet_again(silence_timeout_s, nobody)

    @override
    def admit(self, silence_timeout_s: float, limit: int | None = None) -> Transport:
        return self._meet_again(silence_timeout_s, lambda: self.newcomers()[:limit])

    def _meet_again(self, silence_timeout_s: float, newcomers: Newcomers) -> Transport:
        """Vote and connect in rounds, until the members are connected. Each round leaves out members that have died.

        A round takes `silence_timeout_s + 2 * CONNECT_S` at most: the vote, the connection, and a barrier.
        """
        attempts = 0
        while True:
            now = self.generation
            self.generation = self._after(now, silence_timeout_s, newcomers)
            attempts = attempts + 1 if self.generation.members == now.members else 1
            logger.debug("member %d: generation %d is %s", now.me, self.generation.number, self.generation.members)
            try:
                return self._connected(self.generation)
            except TransportError as error:
                logger.debug("generation %d did not connect: %s", self.generation.number, error)
                # Members that did connect have gone on with this generation. The alarm makes them meet again, too.
                self.raise_alarm(self.generation, f"the members that are left could not connect: {error}")
                if attempts == MOST_ATTEMPTS:
                    raise TransportError(f"the members {list(now.members)} live, and could not connect: {error}") from error

    def _after(self, now: Generation, silence_timeout_s: float, newcomers: Newcomers) -> Generation:
        if now.is_waiting:
            return self._join_queue.wait(now.me, silence_timeout_s, self.has_ended)
        members = MembershipVote(self._keys(now), now.members, now.me, self.has_ended, self.is_running).agree(
            silence_timeout_s, newcomers
        )
        self._join_queue.leave(set(members) - set(now.members))
        return now.next(members)

    def _connected(self, generation: Generation) -> Transport:
        transport = self.connect(generation, CONNECT_S)
        try:
            transport.barrier(Call(Signature("barrier"), scope=CancelScope(CONNECT_S)))
        except (TransportError, TimeoutError) as error:
            transport.abort()
            raise TransportError(f"generation {generation.number} connected, and lost a member at once: {error}") from error
        return transport

    def _keys(self, generation: Generation) -> Store:
        return PrefixStore(generation.prefix, self.store)
