"""GroupWork: a handle on a collective in the queue of its group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
from typing_extensions import override

from ..contract.work import PendingWork, TensorsFuture, devices_of
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
        """Block until finished; inside a callback, run the group's queue up to this collective."""
        if self._progress.is_running_here():
            self._progress.run_until(self.is_completed)
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
        if self._order is None:
            super()._settle(future)
            return
        with self._order.resumed():
            super()._settle(future)
