"""StoreReconnector: after the loss of a rank, the members of a group meet again in the store in which they met at the start."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

from typing_extensions import override

from ..engine.call import Call, Signature
from ..engine.cancel_scope import CancelScope
from ..engine.transport import Transport
from ..errors import CollectiveTimeout, RankGivenUpError, RankLostError, TransportError
from ..stores import PrefixStore, Store
from ..stores.store import poll
from .reconnector import MOST_ATTEMPTS, Generation, Reconnector

DECISION = "members"
"""The key under which the store of a generation has the members of the next generation, as soon as they are decided."""

HasEnded = Callable[[int], bool]
IsRunning = Callable[[int], bool]
Newcomers = Callable[[], Sequence[int]]


def nobody() -> Sequence[int]:
    """Return an empty sequence of newcomers."""
    return ()


class MembershipVote:
    """One vote: the members of one generation agree on the members of the next generation.

    Note [Who is left]
    ~~~~~~~~~~~~~~~~~~
    A *member* keeps its number as long as the job runs. A *generation* is one group of members, with its own keys in the store.
    The vote has four steps::

        1. each survivor sets here/<its number>
        2. it waits, at most `silence_timeout_s`, until each member has set its key or has certainly ended. If the
           running members without a key then outnumber the members with a key, the members with a key give up: perhaps only
           their connections broke, and the others still compute
        3. it proposes the members that have set their keys, and newcomers, by one compare_set of the key "members"; the
           first proposal wins
        4. it reads the decision. If the decision does not contain a member, `agree` raises `RankGivenUpError` in this member

    The operating system tells which members have ended (`ProcessIdentity`). If the decision contains a dead member, the next
    generation cannot connect, and its members vote again.

    Args:
        store: a store for this generation only. The store must live longer than every member.
        members: the numbers of all members of the generation, in the order of their ranks.
        me: this process's number as a member.
        has_ended: whether a member has certainly ended; false if this is not known.
        is_running: whether a member certainly runs and is not stopped; false if this is not known.
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

        Return the numbers of the survivors in the order of their ranks, then the numbers of the newcomers.

        Args:
            silence_timeout_s: how long to wait for a silent member, in seconds.
            newcomers: returns the newcomers to propose.

        Raises:
            RankGivenUpError: the other members have gone on without this member, or more running members were silent than
                members have called `agree`.
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
        silent = [member for member in self._members if member not in present and self._is_running(member)]
        # If the two numbers are equal, raise no error: both halves may make a proposal, but only one proposal can win.
        if len(present) < len(silent):
            # This member ends, so the others must not propose it.
            self._store.delete_key(f"here/{self._me}")
            raise RankGivenUpError(
                f"only the members {list(present)} came within {silence_timeout_s:g} s, but {silent} still run: let member "
                f"{self._me} end, because a small part of the ranks does not go on alone\n"
                "The others go on when they notice the loss. If a step may take longer than this time, pass a larger "
                "silence_timeout_s"
            )

    def _is_settled(self) -> bool:
        if self._store.check([DECISION]):
            return True
        absent = set(self._members) - set(self._present())
        return all(self._has_ended(member) for member in absent)

    def _present(self) -> list[int]:
        return [member for member in self._members if self._store.check([f"here/{member}"])]


class JoinQueue:
    """The queue of newcomers: processes that want to join a running job.

    Note [How a newcomer comes in]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    ::

        newcomer                                        members, in `admit`
        1. takes the next number (`add`)
        2. sets waiting/<its number>
                                                        3. agree on the next generation;
                                                           the proposal contains the waiting newcomers
                                                        4. delete waiting/<number> of each newcomer that they admit
        5. reads the decisions, from generation 0 on,
           until a decision has its number; then all members connect

    If a newcomer dies after step 3, the next generation cannot connect, and the members vote again. Because of step 4, this
    newcomer is not proposed again.

    `first_size` is the number of members of the first generation, and the number of the first newcomer.
    """

    def __init__(self, store: Store, first_size: int) -> None:
        self._store = store
        self._first_size = first_size

    def take_number(self) -> int:
        """Take a number that no other process of the job has."""
        return self._first_size + self._store.add("newcomers", 1) - 1

    def waiting(self) -> list[int]:
        """Return the numbers of the waiting newcomers, in ascending order. Some newcomers may have ended."""
        # If no newcomer ever came, `get` would wait for one.
        if not self._store.check(["newcomers"]):
            return []
        numbers = range(self._first_size, self._first_size + int(self._store.get("newcomers")))
        return [number for number in numbers if self._store.check([_waiting(number)])]

    def leave(self, numbers: Iterable[int]) -> None:
        """Remove newcomers from the queue. Any process may call this method, even for newcomers that are removed already."""
        for number in numbers:
            self._store.delete_key(_waiting(number))

    def wait(self, me: int, silence_timeout_s: float, has_ended: HasEnded) -> Generation:
        """Wait until the members admit this process, which is the newcomer with the number `me`.

        Return the first generation that contains this process.

        Raises:
            CollectiveTimeout: the members did not admit this process within `silence_timeout_s` seconds.
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


logger = logging.getLogger("syncline.collectives")

CONNECT_S = 15.0
"""If the members of a new generation have not connected after this time, in seconds, they vote again."""

_MOST_ALARM_BYTES = 2000


class StoreReconnector(Reconnector):
    """A `Reconnector` in which a `MembershipVote` decides the members of the next group. A subclass connects these members.

    All members can reach the `store`, which exists longer than any member. The first generation has `first_size` members.
    """

    def __init__(self, store: Store, generation: Generation, first_size: int) -> None:
        super().__init__(generation)
        self.store = store
        self._join_queue = JoinQueue(store, first_size)

    @abstractmethod
    def has_ended(self, member: int) -> bool:
        """Whether a member has certainly ended. False if this is not known."""

    def is_running(self, member: int) -> bool:  # noqa: ARG002 - a subclass that can find this out overrides the method
        """Whether a member certainly runs and is not stopped. False if this is not known."""
        return False

    @abstractmethod
    def connect(self, generation: Generation, timeout_s: float) -> Transport:
        """Connect the members of a generation. All these members call this method.

        Raises:
            TransportError: members did not call this method within `timeout_s` seconds, or a member has ended.
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
        # A newcomer takes part in the later rounds, but does not know the limit.
        if self.generation.is_waiting:
            return self._meet_again(silence_timeout_s, nobody)
        before = set(self.generation.members)

        def proposed() -> Sequence[int]:
            # Earlier rounds have let newcomers in already. If such a newcomer is dead, the next `admit` fills its place.
            let_in = len(set(self.generation.members) - before)
            return self.newcomers()[: None if limit is None else max(0, limit - let_in)]

        return self._meet_again(silence_timeout_s, proposed)

    def _meet_again(self, silence_timeout_s: float, newcomers: Newcomers) -> Transport:
        """Vote and connect in rounds, until the members are connected. Each round leaves out members that have died.

        A round takes `silence_timeout_s + 2 * CONNECT_S` at most.
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
                # Members that have connected use the group of this generation. The alarm makes these members vote again.
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
