"""GroupWork: a handle on a collective in the queue of its group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import torch
from typing_extensions import override

from ..contract.work import PendingWork, TensorsFuture, devices_of
from ..torch_internals import modes_active
from .callback_order import CallbackOrder, GuardedFuture
from .device_runtime import StreamOrder
from .progress import Progress


class GroupWork(PendingWork):
    """A pending work that may be waited for inside a callback of its own group."""

    __slots__ = ("_callbacks", "_issued", "_order", "_progress", "_was_waited_for")

    def __init__(
        self,
        tensors: list[torch.Tensor],
        describe: Callable[[], str],
        progress: Progress,
        order: StreamOrder | None,
        callbacks: CallbackOrder,
        issued: int,
    ) -> None:
        super().__init__(tensors, describe)
        self._progress = progress
        self._order = order
        self._callbacks = callbacks
        self._issued = issued
        self._was_waited_for = False

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until finished; inside a callback, or if no other thread does, run the group's queue up to this collective."""
        if self._progress.is_running_here():
            self._progress.run_until(self.is_completed)
        elif timeout is None and not modes_active():  # what runs here has no limit but the group's, and no mode shall see it
            self._progress.help(self.is_completed)
        super().wait(timeout)
        self._was_waited_for = True
        if isinstance(self._future, GuardedFuture):
            self._future.was_waited_for = True
        if self._order is not None:
            self._order.join()
        return True

    @override
    def _new_future(self) -> TensorsFuture:
        future = GuardedFuture(self._callbacks, self._issued, devices_of(self._tensors))
        future.was_waited_for = self._was_waited_for
        return future

    def _settle(self, future: TensorsFuture) -> None:
        """Run the callbacks: see point 5 of Note [One total order] in `progress`."""
        if not self._progress.hand_over(lambda: self._settle_here(future)):
            self._settle_here(future)

    def _settle_here(self, future: TensorsFuture) -> None:
        with nullcontext() if self._order is None else self._order.resumed():
            super()._settle(future)
