"""Works and requests of torch.distributed seen as ours."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from .deadline import Deadline, seconds
from .errors import CollectiveTimeout, TransportError
from .layout import untracked
from .transport import Request
from .work import TensorsFuture, Work


class TorchRequest(Request):
    """A torch.distributed send or receive; torch cannot say whether it is over without waiting for it."""

    def __init__(self, torch_work: Any, wire: torch.Tensor, *, receives: bool) -> None:
        self._torch_work = torch_work
        self._wire = wire
        self._receives = receives
        self._source: int | None = None
        self._over = False

    def wait(self, deadline: Deadline) -> None:
        """Block in torch."""
        if self._over:
            return
        try:
            self._torch_work.wait(timedelta(seconds=max(deadline.remaining_s(), 1e-3)))
        except RuntimeError as error:
            raise _mapped(error) from error
        self._over = True
        if self._receives:
            self._source = self._torch_work._source_rank()

    def test(self) -> bool:
        """Whether `wait` has returned."""
        return self._over

    def source(self) -> int | None:
        """The sender, once a receive is over."""
        return self._source


def _mapped(error: RuntimeError) -> Exception:
    timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
    kind = CollectiveTimeout if timed_out else TransportError
    return kind(f"torch.distributed reported: {error}")


class TorchWork(Work):
    """A torch.distributed work, and what remains to be done when it has finished."""

    def __init__(self, tensors: list[torch.Tensor], torch_work: Any, finish: Callable[[], Any] | None, place: str) -> None:
        self._tensors = tensors
        self._torch_work = torch_work
        self._place = place

        def deliver(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
            done.value()
            if finish is not None:
                with untracked():
                    finish()
            return tensors

        self._future: TensorsFuture = torch_work.get_future().then(deliver)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until finished; see `Work.wait`."""
        try:
            if timeout is not None:
                self._torch_work.wait(timedelta(seconds=seconds(timeout)))
            self._future.wait()
        except RuntimeError as error:
            raise _mapped(error) from error
        return True

    def is_completed(self) -> bool:
        """Whether the collective and what followed it are done."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """The error, if it has finished with one."""
        if not self._future.done():
            return None
        try:
            self._future.value()
        except RuntimeError as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._tensors

    def get_future(self) -> TensorsFuture:
        """A future that completes when `wait` would return."""
        return self._future
