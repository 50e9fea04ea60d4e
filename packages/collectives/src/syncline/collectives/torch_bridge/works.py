"""TorchSideWork makes one of our works a work of torch. CoalescedWork makes several of our works one work."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ..engine.queue import a_queue_runs_here
from ..errors import InvalidArgumentError
from ..torch_internals import disable_dynamo
from ..work import TensorsFuture, Work, future_for_torch, join_futures
from .options import time_limit_s


class TorchSideWork(dist.Work):
    """One of our works as a torch work.

    C++ calls only `wait` and `get_future`; Python also calls the other methods.

    Args:
        ours: our work.
        timeout_s: the time limit of `wait` without an argument, in seconds; None: the group's limit.
        on_asked: called once, with this object, when somebody first waits for the work or asks for its future.
    """

    def __init__(
        self, ours: Work, timeout_s: float | None = None, on_asked: Callable[[TorchSideWork], None] | None = None
    ) -> None:
        super().__init__()
        self.ours = ours
        self._timeout_s = timeout_s
        self._on_asked = on_asked

    @disable_dynamo
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the collective has finished. On CUDA, order the current stream after the collective instead."""
        self._asked()
        limit_s = time_limit_s(timeout)
        return self.ours.wait(self._timeout_s if limit_s is None else limit_s)

    def synchronize(self) -> None:
        """Call `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Call `wait`, which on CUDA orders the stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the collective has finished, with or without an error."""
        return self.ours.is_completed()

    def is_success(self) -> bool:
        """Whether the collective has finished without an error."""
        return self.ours.is_completed() and self.ours.exception() is None

    def exception(self) -> BaseException | None:
        """The error with which the collective failed, or None."""
        return self.ours.exception()

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self.ours.result()

    def source_rank(self) -> int:
        """The sender's rank in the group, for a receive that has finished.

        Raises:
            InvalidArgumentError: this is not a receive, or it has not finished.
        """
        source = self.ours.source_rank()
        if source is None:
            raise InvalidArgumentError("source_rank() is of a receive that has finished, found another work; wait() first")
        return source

    _source_rank = source_rank

    @disable_dynamo
    def get_future(self) -> TensorsFuture:
        """A future of the output tensors that also works in C++; see Note [Futures that fail] in `work`."""
        self._asked()
        future = self.ours.get_future()
        # A callback of our queue may wait for the future, which works only with our own class of futures.
        if a_queue_runs_here():
            return future
        return future_for_torch(future, self.ours.result())

    def _asked(self) -> None:
        on_asked, self._on_asked = self._on_asked, None
        if on_asked is not None:
            on_asked(self)


class CoalescedWork(Work):
    """One work of ours for several collectives that torch calls in a batch (coalesced)."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for all works. The time limit holds for each work separately."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all works have finished."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first error among the works, or None."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The outputs of all works, in their order."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> TensorsFuture:
        """A future that completes when all works have finished."""
        return join_futures([work.get_future() for work in self._works], self.result())
