"""Reconnector: from a group that lost members to the connection of those that are left."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.transport import Transport
from ..health.leaving import GroupLeavers

MOST_ATTEMPTS = 4
"""So often the same members try to connect before a shrink fails."""

WAITING = -1
"""The number of a newcomer's generation."""


@dataclass(frozen=True)
class Generation:
    """One group of members, all of whom know it by this number.

    Attributes:
        number: 0 for the group that the job began with; `WAITING` for that of a newcomer alone, who was not let in yet.
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
    def is_waiting(self) -> bool:
        """Whether it is that of a newcomer who was not let in yet."""
        return self.number == WAITING

    @property
    def prefix(self) -> str:
        """Of its keys in a store."""
        return f"generation{self.number}"

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.members.index(self.me)


class Reconnector(ABC):
    """How the members of a group meet again; one for each backend.

    Args:
        generation: of the group as it is.
    """

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def missing(self) -> str | None:
        """What keeps the members from meeting again, in one sentence; None if nothing does."""
        return None

    def missing_for_admit(self) -> str | None:
        """What keeps newcomers from coming in, in one sentence; None if nothing does."""
        return "its members do not meet in a store; use backend 'gloo' with init_method='file:///shared/folder'"

    def newcomers(self) -> Sequence[int]:
        """Those who wait to be let in."""
        return ()

    def admit(self, silence_timeout_s: float, limit: int | None = None) -> Transport:
        """As `shrink`, with those who wait, or the first so many of them. A newcomer calls it to wait.

        Raises:
            CollectiveTimeout: nobody let this newcomer in.
            RankLostError: those who could have are all gone.
        """
        raise NotImplementedError  # of a reconnector for whose newcomers nothing is missing

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what it met by; nobody meets any more. All members call it, after the group's transport was closed."""

    def leavers(self) -> GroupLeavers | None:
        """Count the calls of this generation's group, and say who has left; None where nobody tells. Called once for each."""
        return None

    def raise_alarm(self, generation: Generation, why: str) -> None:  # noqa: B027 - a library may tell them
        """Tell the members of a generation that it has lost somebody, so that none waits in vain."""

    def alarm(self, generation: Generation) -> str | None:  # noqa: ARG002 - a library may tell it
        """Why a member of a generation has raised the alarm; None if none has."""
        return None

    @abstractmethod
    def shrink(self, silence_timeout_s: float) -> Transport:
        """Connect those that are left; `generation` is theirs from then on. Every survivor calls it, and again if it fails.

        Raises:
            RankGivenUpError: the others have gone on without this member.
            TransportError: nobody died, and yet the members could not connect.
        """
