"""Reunion: from a group that lost members to the connection of those that are left."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ..contract.collective import Collective
from ..contract.deadline import Deadline
from ..contract.running_call import RunningCall
from ..errors import TransportError
from ..host.transport import Transport
from ..stores import PrefixStore, Store
from .roll_call import RollCall

logger = logging.getLogger("syncline.collectives")

CONNECT_S = 15.0
"""How long the members of a new generation may take to connect, in seconds; then they are called again."""

_MOST_ALARM_BYTES = 2000

MOST_ATTEMPTS = 4
"""So often the same members try to connect before the shrink fails."""


@dataclass(frozen=True)
class Generation:
    """One group of members, all of whom know it by this number.

    Attributes:
        number: 0 for the group that the job began with.
        members: their numbers, in the order of their ranks.
        me: this process's number among them.
    """

    number: int
    members: tuple[int, ...]
    me: int

    def next(self, members: Sequence[int]) -> Generation:
        """The generation after this one."""
        return Generation(self.number + 1, tuple(members), self.me)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.members.index(self.me)


class Reunion(ABC):
    """How the members of a group meet again; one for each backend.

    Args:
        store: what all members reach, and what outlives each of them.
        generation: of the group as it is.
    """

    def __init__(self, store: Store, generation: Generation) -> None:
        self.store = store
        self.generation = generation

    @abstractmethod
    def has_ended(self, member: int) -> bool:
        """Whether that member has certainly ended; false if nobody knows."""

    @abstractmethod
    def connect(self, generation: Generation, timeout_s: float) -> Transport:
        """Connect the members of a generation. All of them call it.

        Raises:
            TransportError: they did not come within `timeout_s` seconds, or one has ended.
        """

    def missing(self) -> str | None:
        """What keeps the members from meeting again, in one sentence; None if nothing does."""
        return None

    def raise_alarm(self, generation: Generation, why: str) -> None:
        """Tell the members of a generation that it has lost somebody, so that none waits in vain. The first alarm stays."""
        self._keys(generation).compare_set("alarm", b"", why.encode()[:_MOST_ALARM_BYTES])

    def alarm(self, generation: Generation) -> str | None:
        """Why a member of a generation has raised the alarm; None if none has."""
        keys = self._keys(generation)
        return keys.get("alarm").decode(errors="replace") if keys.check(["alarm"]) else None

    def shrink(self, patience_s: float) -> Transport:
        """Connect those that are left; `generation` is theirs from then on. Every survivor calls it.

        A member that dies meanwhile is left out of the next generation. Each round takes `patience_s + CONNECT_S` at most.

        Raises:
            RankGivenUpError: the others have gone on without this member.
            TransportError: nobody died, and yet the members could not connect.
        """
        attempts = 0
        while True:
            now = self.generation
            call = RollCall(self._keys(now), now.members, now.me, self.has_ended)
            self.generation = now.next(call.survivors(patience_s))
            attempts = attempts + 1 if self.generation.members == now.members else 1
            logger.debug("member %d: generation %d is %s", now.me, self.generation.number, self.generation.members)
            try:
                return self._connected(self.generation)
            except TransportError as error:
                logger.debug("generation %d did not connect: %s", self.generation.number, error)
                self.raise_alarm(self.generation, f"the members that are left could not connect: {error}")
                if attempts == MOST_ATTEMPTS:
                    raise TransportError(f"the members {list(now.members)} live, and could not connect: {error}") from error

    def _connected(self, generation: Generation) -> Transport:
        transport = self.connect(generation, CONNECT_S)
        try:
            transport.barrier(RunningCall(Collective("barrier"), Deadline(CONNECT_S)))
        except (TransportError, TimeoutError) as error:
            transport.abort()
            raise TransportError(f"generation {generation.number} connected, and lost a member at once: {error}") from error
        return transport

    def _keys(self, generation: Generation) -> Store:
        return PrefixStore(f"generation{generation.number}", self.store)
