"""Reconnector: connects the members that are left of a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.transport import Transport
from ..health.leaving import GroupLeavers

MOST_ATTEMPTS = 4
"""How often the same members try to connect before a shrink fails."""

WAITING = -1
"""The number of a newcomer's generation."""


@dataclass(frozen=True)
class Generation:
    """One group of members. All members use the same number for a generation.

    Attributes:
        number: 0 for the first group of the job; `WAITING` for the group of a newcomer that was not let in yet.
        members: the members' numbers, in the order of their ranks.
        me: this process's number as a member.
    """

    number: int
    members: tuple[int, ...]
    me: int

    def next(self, members: Sequence[int]) -> Generation:
        """The generation after this one."""
        return Generation(self.number + 1, tuple(members), self.me)

    @property
    def is_waiting(self) -> bool:
        """Whether this is the generation of a newcomer that was not let in yet."""
        return self.number == WAITING

    @property
    def prefix(self) -> str:
        """The prefix of this generation's keys in a store."""
        return f"generation{self.number}"

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.members.index(self.me)


class Reconnector(ABC):
    """Lets the members of a group meet again. Each backend has its own class.

    Args:
        generation: the group's current generation.
    """

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def missing(self) -> str | None:
        """Why the members cannot meet again, in one sentence; None if they can."""
        return None

    def missing_for_admit(self) -> str | None:
        """Why newcomers cannot come in, in one sentence; None if they can."""
        return "its members do not meet in a store; use backend 'gloo' with init_method='file:///shared/folder'"

    def newcomers(self) -> Sequence[int]:
        """The numbers of the newcomers that wait to be let in."""
        return ()

    def admit(self, silence_timeout_s: float, limit: int | None = None) -> Transport:
        """Do the same as `shrink`, and let in waiting newcomers, at most `limit`. A newcomer calls it to be let in.

        Raises:
            CollectiveTimeout: the members did not let this newcomer in.
            RankLostError: all members that could have let this newcomer in are gone.
        """
        raise NotImplementedError  # only called if `missing_for_admit` gives None

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release the resources for meeting again. All members call it, after the group's transport was closed."""

    def leavers(self) -> GroupLeavers | None:
        """An object that knows which ranks have left the group; None if ranks do not tell. Called once for each generation."""
        return None

    def raise_alarm(self, generation: Generation, why: str) -> None:  # noqa: B027 - the library may tell the members itself
        """Tell the members of a generation that their group has failed, and why, so that no member waits uselessly."""

    def alarm(self, generation: Generation) -> str | None:  # noqa: ARG002 - the library may tell the member itself
        """Why a member of a generation has raised the alarm; None if no member has."""
        return None

    @abstractmethod
    def shrink(self, silence_timeout_s: float) -> Transport:
        """Connect the survivors. On return, `generation` is their new generation.

        Every survivor calls this method, and calls it again if it fails.

        Raises:
            RankGivenUpError: the others have gone on without this member.
            TransportError: the members could not connect, although none of them died.
        """
