"""GroupWork: a handle on a collective in the queue of its group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch

from ..contract.work import PendingWork, TensorsFuture
from .device_runtime import StreamOrder
from .progress import Progress


class GroupWork(PendingWork):
    """A pending work that may be waited for inside a callback of its own group."""

    __slots__ = ("_order", "_progress")

    def __init__(
        self, tensors: list[torch.Tensor], describe: Callable[[], str], progress: Progress, order: StreamOrder | None
    ) -> None:
        super().__init__(tensors, describe)
        self._progress = progress
        self._order = order

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until finished; inside a callback, run the group's queue up to this collective."""
        if self._progress.is_running_here():
            self._progress.run_until(self.is_completed)
        super().wait(timeout)
        if self._order is not None:
            self._order.join()
        return True

    def _settle(self, future: TensorsFuture) -> None:
        if self._order is None:
            super()._settle(future)
            return
        with self._order.resumed():
            super()._settle(future)
