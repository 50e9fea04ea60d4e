"""RollCall: the members of a group that lost some agree, in a store, on who is left."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ..contract.deadline import Deadline
from ..errors import RankGivenUpError
from ..stores import Store
from ..stores.polling import poll

HasEnded = Callable[[int], bool]


class RollCall:
    """One agreement on the survivors of one generation of a group.

    Note [Who is left]
    ~~~~~~~~~~~~~~~~~~
    A *member* keeps its number for as long as the job runs; a *generation* is one group of members. For each generation the
    store has keys of its own::

        1. each survivor sets here/<its number>
        2. it waits until each member has set its key or has certainly ended, at most `patience_s`
        3. it proposes those that have set their keys, by one compare_set of the key "members"; the first proposal holds
        4. it reads what holds. Who is not in it was given up, and ends itself

    Nothing is guessed: who has ended is known from the system (`process_identity`), and who is silent for too long is given up
    by an agreement that it, too, reads when it comes back. There is one decision for a generation, whoever dies meanwhile,
    because there is one compare_set that wins. A member that dies after step 1 may be in the decision; then the next generation
    cannot connect, and is called in its turn.

    Args:
        store: for this generation alone; it must outlive any member.
        members: all members of the generation, in order.
        me: this process's number.
        has_ended: whether a member has certainly ended; false if nobody knows.
    """

    def __init__(self, store: Store, members: Sequence[int], me: int, has_ended: HasEnded) -> None:
        self._store = store
        self._members = tuple(members)
        self._me = me
        self._has_ended = has_ended

    def survivors(self, patience_s: float) -> tuple[int, ...]:
        """Those on whom all survivors agree, in the order of the members. Every survivor calls it.

        Raises:
            RankGivenUpError: the others have gone on without this member.
            StoreError: the store itself is lost.
        """
        self._store.set(f"here/{self._me}", b"")
        poll(self._is_settled, Deadline(patience_s))
        proposed = json.dumps(self._present())
        agreed = tuple(json.loads(self._store.compare_set("members", "", proposed)))
        if self._me not in agreed:
            raise RankGivenUpError(
                f"member {self._me} was silent for too long, and the members {list(agreed)} have gone on without it. This "
                "process can do nothing more for the job: let it end"
            )
        return agreed

    def _is_settled(self) -> bool:
        if self._store.check(["members"]):
            return True
        absent = set(self._members) - set(self._present())
        return all(self._has_ended(member) for member in absent)

    def _present(self) -> list[int]:
        return [member for member in self._members if self._store.check([f"here/{member}"])]
