"""The object that a rank gets in place of a group that it is not in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from ..errors import MisuseError


class NonMember:
    """The result of `new_group` on a rank that is not in the new group. Using it as a group raises an error."""

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self._rank = rank

    def error_message(self) -> str:
        """Why this rank cannot use the group."""
        return (
            f"rank {self._rank} is not in group '{self.name}', which has ranks {list(self.ranks)}; call its collectives only "
            "on those ranks (get_rank(group) is -1 elsewhere)"
        )

    @staticmethod
    def refuse(group: object) -> None:
        """Raise if this is a `NonMember`.

        Raises:
            MisuseError: it says which ranks the group has.
        """
        if isinstance(group, NonMember):
            raise MisuseError(group.error_message())

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # Python itself asks for these, to copy or pickle, say
            raise AttributeError(attribute)
        raise MisuseError(f"{attribute}: {self.error_message()}")
