"""JoinQueue: processes that want to join a running job wait in a store until the job's ranks let them in."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ..engine.cancel_scope import CancelScope
from ..errors import CollectiveTimeout, RankLostError
from ..stores import PrefixStore, Store
from ..stores.store import poll
from .membership_vote import DECISION, HasEnded
from .reconnector import Generation


class JoinQueue:
    """The queue of newcomers: processes that want to join a running job. Each newcomer takes a number, and waits to be let in.

    Note [How a newcomer comes in]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    ::

        newcomer                                        members, in `admit`
        1. takes the next number (`add`)
        2. sets waiting/<its number>
                                                        3. agree on the next generation (see below);
                                                           the proposal contains the waiting newcomers
                                                        4. delete waiting/<number> of each newcomer that they let in
        5. reads the decisions, from generation 0 on,
           until a decision has its number; then all members connect

    Note [Who is left] in `membership_vote` says what a generation is, and how the members agree. A newcomer that dies before
    step 3 is not proposed, if it is on the same machine as the proposing member. A newcomer that dies later is a lost member:
    the next generation cannot connect, and the members vote again. Because of step 4, this newcomer is not proposed again.

    Args:
        store: the store in which the members meet.
        first_size: how many members the first generation has. Their numbers are 0 to `first_size - 1`, so the first newcomer
            gets the number `first_size`.
    """

    def __init__(self, store: Store, first_size: int) -> None:
        self._store = store
        self._first_size = first_size

    def take_number(self) -> int:
        """Take a number that no other process of the job has."""
        return self._first_size + self._store.add("newcomers", 1) - 1

    def waiting(self) -> list[int]:
        """The numbers of the waiting newcomers, ascending. The processes of some of them may have ended."""
        # If no newcomer ever came, `get` would wait for one.
        if not self._store.check(["newcomers"]):
            return []
        numbers = range(self._first_size, self._first_size + int(self._store.get("newcomers")))
        return [number for number in numbers if self._store.check([_waiting(number)])]

    def leave(self, numbers: Iterable[int]) -> None:
        """Remove newcomers from the queue. Any process may call this method. Several processes may remove the same newcomer."""
        for number in numbers:
            self._store.delete_key(_waiting(number))

    def wait(self, me: int, silence_timeout_s: float, has_ended: HasEnded) -> Generation:
        """Wait until the members let this process in, the newcomer with the number `me`. Returns the first generation with it.

        Raises:
            CollectiveTimeout: the members did not let this process in within `silence_timeout_s` seconds.
            RankLostError: all members have ended.
        """
        self._store.set(_waiting(me), b"")
        known = Generation(0, tuple(range(self._first_size)), me)

        def is_over() -> bool:
            nonlocal known
            # Several generations may have been decided since the last look.
            while me not in known.members and (decided := self._decided(known)) is not None:
                known = known.next(decided)
            return me in known.members or all(has_ended(member) for member in known.members)

        in_time = poll(is_over, CancelScope(silence_timeout_s))
        if me in known.members:
            return known
        # This process gives up, so the members must not propose it.
        self.leave([me])
        if in_time:
            raise RankLostError(
                f"the job that this process came to join has ended: all its processes {list(known.members)} are gone", ()
            )
        raise CollectiveTimeout(
            f"the members {list(known.members)} of the job did not let this process in within {silence_timeout_s:g} s "
            "(timeout): they call `admit`, or train with `Elastic`, which does; do they wait for something, or have they "
            "finished?"
        )

    def _decided(self, generation: Generation) -> tuple[int, ...] | None:
        keys = PrefixStore(generation.prefix, self._store)
        return tuple(json.loads(keys.get(DECISION))) if keys.check([DECISION]) else None


def _waiting(number: int) -> str:
    return f"waiting/{number}"
