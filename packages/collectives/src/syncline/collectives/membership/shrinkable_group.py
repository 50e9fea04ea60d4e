"""ShrinkableGroup: a `HostGroup` that its members can replace by a new group, without lost ranks or with newcomers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from typing_extensions import override

from ..engine.call import Signature
from ..engine.host_group import HostGroup
from ..engine.transport import Transport
from ..errors import StoreError, TransportError, headline
from ..group import ProcessGroup
from .reconnector import Reconnector


class ShrinkableGroup(HostGroup):
    """A `HostGroup` that its surviving members can replace by a new group, with or without newcomers.

    If a collective fails on a rank, the rank writes an alarm to the store, if there is one. Ranks in a long collective look for
    the alarm.

    Args:
        transport: connects the members of `reconnector.generation`.
        reconnector: connects the members again after the loss of a rank.
        options: the other arguments of `HostGroup`.
    """

    def __init__(self, transport: Transport, reconnector: Reconnector, **options: Any) -> None:
        generation = reconnector.generation
        super().__init__(
            transport,
            generation.rank,
            len(generation.members),
            # `transports.mpi.connection` and `transports.gloo.connect` set `transport.liveness`. Over threads it is None.
            liveness=transport.liveness,
            leavers=reconnector.leavers(),
            **options,
        )
        self._reconnector = reconnector
        self._generation = generation
        self._options = options
        self.recorder.members = generation.members

    @override
    def missing_for_shrink(self) -> str | None:
        return self._reconnector.missing()

    @override
    def missing_for_admit(self) -> str | None:
        return self._reconnector.missing_for_admit()

    @property
    @override
    def members(self) -> tuple[int, ...]:
        return self._generation.members

    @property
    @override
    def is_waiting(self) -> bool:
        return self._generation.is_waiting

    @override
    def newcomers(self) -> int:
        return 0 if self.is_waiting or self.missing_for_admit() is not None else len(self._reconnector.newcomers())

    @override
    def _shrink(self, silence_timeout_s: float) -> ProcessGroup:
        self._check_is_latest("shrink")
        # Raise the alarm before `abort`, so that the other ranks stop waiting in the old group, and learn this reason.
        self._reconnector.raise_alarm(self._reconnector.generation, f"rank {self.rank} has called shrink")
        self.abort()
        return self._replaced(self._reconnector.shrink(silence_timeout_s))

    @override
    def _admit(self, silence_timeout_s: float, limit: int | None) -> ProcessGroup:
        self._check_is_latest("admit")
        transport = self._reconnector.admit(silence_timeout_s, limit)
        self.abort()  # not earlier: a member that had not yet come to `admit` could still need this group
        return self._replaced(transport)

    def _check_is_latest(self, call: str) -> None:
        if self._is_in_fork or self._is_replaced:  # before anything else, so that a forked child raises no alarm
            raise self._refusal(Signature(call))

    def _replaced(self, transport: Transport) -> ProcessGroup:
        # The program may have changed the time limit since this group was made.
        newer = type(self)(transport, self._reconnector, **{**self._options, "timeout_s": self.timeout_s})
        self._is_replaced = True
        if self._leavers is not None:
            self._leavers.is_closed = True  # the old group counts as closed, because the new group takes its place
        newer.report_to(self._reporter)
        newer.expect_losses(self._losses_are_expected)
        newer.warn_of_stalls(self._stall_warning_s)
        return newer

    @override
    def _close_transport(self) -> None:
        super()._close_transport()
        self._reconnector.close()

    @override
    def _alarm(self) -> TransportError | None:
        # If the members cannot connect again, no rank raises an alarm; see `_on_failure`.
        if self._reconnector.missing() is not None:
            return None
        with suppress(StoreError):  # without the store the group still communicates; only the alarm is lost
            why = self._reconnector.alarm(self._generation)
            return None if why is None else TransportError(f"another rank says that this collective will not finish: {why}")
        return None

    @override
    def _on_failure(self, failure: BaseException) -> None:
        if self._reconnector.missing() is None:
            with suppress(StoreError):
                self._reconnector.raise_alarm(self._generation, headline(failure))
