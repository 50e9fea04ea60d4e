"""CallbackOrder: refuses collectives whose place in the total order would be another on each rank."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

from typing_extensions import override

from ..contract.work import Devices, GroupFuture
from ..errors import MisuseError

Callback = Callable[[Any], Any]

# After every call: nothing that is attached to the work is late.
_IN_CALLBACK = sys.maxsize


class CallbackOrder:
    """Counts the calls of a group that are issued outside of callbacks, and knows which callbacks came too late.

    Note [Late callbacks]
    ~~~~~~~~~~~~~~~~~~~~~
    A callback runs when its collective has finished, or at once if it has. If it was attached after later collectives of the
    group had been issued, one rank may run it before them and another one after them: what it issues would have another place
    in the order on each rank. Whether it came too late is known from counts alone, and the same on all ranks, so the collective
    is refused. If the program has waited for the work before, the callback runs at once on every rank, and is not late. What a
    callback issues is over when the call returns, so callbacks attached to that are never late. The same holds for the futures
    that `then` returns.

    Not seen: callbacks of a future that torch makes of ours, such as that of `torch.futures.collect_all`.

    Attributes:
        issued: how many calls were issued outside of callbacks.
        running: for each thread that runs a callback, whether the callback came too late.
    """

    def __init__(self) -> None:
        self.issued = 0
        self.running: dict[int, bool] = {}

    def issue(self, what: str, place: Callable[[], str]) -> int:
        """This thread issues a call; its number among those issued outside of callbacks, or `_IN_CALLBACK`.

        Raises:
            MisuseError: it does so in a callback that came too late.
        """
        if self.running:
            is_late = self.running.get(get_ident())
            if is_late:
                raise MisuseError(
                    f"{what} on {place()} was called in a callback that was attached to a work after later collectives of the "
                    "group had been issued, so its place in their order would be another on each rank. Attach the callback "
                    "before the next collective is issued, or wait for the work first"
                )
            if is_late is not None:
                return _IN_CALLBACK
        self.issued += 1
        return self.issued

    def guard(self, callback: Callback, number: int, *, was_waited_for: bool) -> Callback:
        """A callback that is attached now to the work of call `number`."""
        is_inside = get_ident() in self.running
        is_late = self.issued > number and not was_waited_for and not is_inside
        return functools.partial(self._run, callback, is_late)

    def _run(self, callback: Callback, is_late: bool, future: Any) -> Any:
        me = get_ident()
        outer = self.running.get(me)
        self.running[me] = is_late or bool(outer)
        try:
            return callback(future)
        finally:
            if outer is None:
                del self.running[me]
            else:
                self.running[me] = outer


class GuardedFuture(GroupFuture):
    """A future whose callbacks are guarded when they are attached. It does not hold the work, which holds it.

    Args:
        order: of the group.
        number: of the call, as `CallbackOrder.issue` gave it.
        devices: as torch's.

    Attributes:
        was_waited_for: whether this future or its work was waited for.
    """

    def __init__(self, order: CallbackOrder, number: int, devices: Devices) -> None:
        super().__init__(devices)
        self._order = order
        self._number = number
        self.was_waited_for = False

    @override
    def wait(self) -> Any:
        result = super().wait()
        self.was_waited_for = True
        return result

    @override
    def add_done_callback(self, callback: Callback) -> None:
        super().add_done_callback(self._order.guard(callback, self._number, was_waited_for=self.was_waited_for))

    @override
    def _following(self) -> GuardedFuture:
        return GuardedFuture(self._order, self._number, self._devices)
