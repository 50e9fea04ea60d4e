"""Reconnector: connects the survivors of a group and newcomers (processes that start later) as members of the next group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.transport import Transport
from ..health.leaving import GroupLeavers

MOST_ATTEMPTS = 4
"""How often the same members try to connect before a shrink fails."""

WAITING = -1
"""The value of `Generation.number` in a newcomer that is not admitted yet."""


@dataclass(frozen=True)
class Generation:
    """The members of one group. When members are lost or newcomers are admitted, a new group with the next generation follows.

    Attributes:
        number: counts the generations of the job from 0; `WAITING` in a newcomer that is not admitted yet.
        members: the members' numbers, in the order of their ranks. A member keeps its number.
        me: this process's number as a member.
    """

    number: int
    members: tuple[int, ...]
    me: int

    def next(self, members: Sequence[int]) -> Generation:
        r"""Return the next generation, with these members."""
        return Generation(self.number + 1, tuple(members), self.me)

    @property
    def is_waiting(self) -> bool:
        """Whether this is the generation of a newcomer that is not admitted yet."""
        return self.number == WAITING

    @property
    def prefix(self) -> str:
        """The prefix of this generation's keys in a store."""
        return f"generation{self.number}"

    @property
    def rank(self) -> int:
        """This process's rank in the group of this generation."""
        return self.members.index(self.me)


class Reconnector(ABC):
    """Connects the remaining members of a group after the loss of a rank. Each backend that can do this has a subclass."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def missing(self) -> str | None:
        """Return why the members cannot connect again. None if they can connect."""
        return None

    def missing_for_admit(self) -> str | None:
        """Return why no newcomer can join. None if newcomers can join."""
        return "its members do not meet in a store; use backend 'gloo' with init_method='file:///shared/folder'"

    def newcomers(self) -> Sequence[int]:
        """Return the numbers of the newcomers that wait for a call of `admit`."""
        return ()

    def admit(self, silence_timeout_s: float, limit: int | None = None) -> Transport:
        """Connect the surviving members and at most `limit` newcomers (None: all). Newcomers call this method, too.

        See also `ProcessGroup.admit`.

        Raises:
            CollectiveTimeout: the members did not admit this newcomer in time.
            RankLostError: all members that could have admitted this newcomer are gone.
        """
        raise NotImplementedError  # only called if `missing_for_admit` gives None

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release the resources of this object. All members call this method after the group's transport was closed."""

    def leavers(self) -> GroupLeavers | None:
        """Make the `GroupLeavers` of this generation; None if ranks do not announce that they leave the job."""
        return None

    def raise_alarm(self, generation: Generation, why: str) -> None:  # noqa: B027 - the library may tell the members itself
        """Tell the members of a generation that their group has failed, and the reason, so that no member waits uselessly."""

    def alarm(self, generation: Generation) -> str | None:  # noqa: ARG002 - the library may tell the member itself
        """Return the reason that a member of a generation has passed to `raise_alarm`. None if there was no alarm."""
        return None

    @abstractmethod
    def shrink(self, silence_timeout_s: float) -> Transport:
        """Connect the surviving members. On return, the attribute `generation` is their new generation.

        Every survivor calls this method. A survivor whose call fails may call this method again.

        Raises:
            RankGivenUpError: the other members have gone on without this member.
            TransportError: the members could not connect, although no member died.
        """
