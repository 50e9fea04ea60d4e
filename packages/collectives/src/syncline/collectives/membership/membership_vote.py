"""MembershipVote: in a store, the members of a group agree on the members of the next group."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ..engine.cancel_scope import CancelScope
from ..errors import RankGivenUpError
from ..stores import Store
from ..stores.store import poll

DECISION = "members"
"""The key under which the store of a generation has the members of the next generation, as soon as they are decided."""

HasEnded = Callable[[int], bool]
IsRunning = Callable[[int], bool]
Newcomers = Callable[[], Sequence[int]]


def nobody() -> Sequence[int]:
    """Return no newcomers. The default of `MembershipVote.agree`."""
    return ()


class MembershipVote:
    """One vote: the members of one generation agree on the members of the next generation.

    Note [Who is left]
    ~~~~~~~~~~~~~~~~~~
    A *member* keeps its number as long as the job runs. A *generation* is one group of members. In the store, each generation
    has its own keys::

        1. each survivor sets here/<its number>
        2. it waits, at most `silence_timeout_s`, until each member has set its key or has certainly ended. If the running
           members without a key are then more than the members with a key, the members with a key give up: perhaps only
           their connections broke, and the others still compute
        3. it proposes the members that have set their keys, by one compare_set of the key "members"; the first proposal wins
        4. it reads the decision. A member that is not in the decision was given up, and ends itself

    Nothing is guessed. The operating system tells which members have ended (`ProcessIdentity`). If a member is silent for too
    long, the decision leaves this member out. The member reads the decision when it comes back. Newcomers are added to the
    proposal (step 3), and read the decision, too. Each generation has exactly one decision, whichever members die meanwhile,
    because one compare_set wins. A member that dies after step 1 may be in the decision. Then the next generation cannot
    connect, and its members vote again.

    Args:
        store: a store for this generation only; it must outlive every member.
        members: the numbers of all members of the generation, in the order of their ranks.
        me: this process's number as a member.
        has_ended: returns whether the member with a number has certainly ended; false if this is not known.
        is_running: returns whether the member with a number certainly runs and is not stopped; false if this is not known, as
            for a member on another host.
    """

    def __init__(
        self,
        store: Store,
        members: Sequence[int],
        me: int,
        has_ended: HasEnded,
        is_running: IsRunning = lambda _: False,
    ) -> None:
        self._store = store
        self._members = tuple(members)
        self._me = me
        self._has_ended = has_ended
        self._is_running = is_running

    def agree(self, silence_timeout_s: float, newcomers: Newcomers = nobody) -> tuple[int, ...]:
        """Agree on the members of the next generation. Every survivor calls this method, and gets the same result.

        Returns the numbers of the survivors in order, then of the newcomers.

        Args:
            silence_timeout_s: how long to wait for a silent member, in seconds.
            newcomers: returns the newcomers to propose. Survivors may propose different newcomers: only one proposal wins.

        Raises:
            RankGivenUpError: the others have gone on without this member; or the members that have called `agree` are fewer
                than the members that run but have not called it.
            StoreError: the store itself is lost.
        """
        self._store.set(f"here/{self._me}", b"")
        poll(self._is_settled, CancelScope(silence_timeout_s))
        present = self._present()
        # Once there is a decision, it no longer matters how many members have set their keys.
        if not self._store.check([DECISION]):
            self._check_outnumbered(present, silence_timeout_s)
        proposed = json.dumps([*present, *newcomers()])
        agreed = tuple(json.loads(self._store.compare_set(DECISION, "", proposed)))
        if self._me not in agreed:
            raise RankGivenUpError(
                f"member {self._me} was silent for too long, and the members {list(agreed)} have gone on without it. This "
                "process can do nothing more for the job: let it end"
            )
        return agreed

    def _check_outnumbered(self, present: Sequence[int], silence_timeout_s: float) -> None:
        """Give up (raise `RankGivenUpError`) if more members run silently than are `present`.

        If the two numbers are equal, go on: both halves may make a proposal, but only one proposal can win.
        """
        silent = [member for member in self._members if member not in present and self._is_running(member)]
        if len(present) < len(silent):
            # This member ends, so the others must not propose it.
            self._store.delete_key(f"here/{self._me}")
            raise RankGivenUpError(
                f"only the members {list(present)} came within {silence_timeout_s:g} s, while {silent} run and said nothing: "
                f"so few do not go on without so many. Let member {self._me} end; the others go on when they notice. If they "
                "may compute for longer than that, pass a larger silence_timeout_s"
            )

    def _is_settled(self) -> bool:
        if self._store.check([DECISION]):
            return True
        absent = set(self._members) - set(self._present())
        return all(self._has_ended(member) for member in absent)

    def _present(self) -> list[int]:
        return [member for member in self._members if self._store.check([f"here/{member}"])]
