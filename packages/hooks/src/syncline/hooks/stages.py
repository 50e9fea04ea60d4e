"""Run a hook that issues several collectives one after another. Such a hook is a generator; see Note [Stages].

Note [Stages]
~~~~~~~~~~~~~
A hook that needs the result of one collective for the next collective is a generator. The generator yields each `Work`,
continues when this work has finished, and returns the reduced bucket at the end. A stage is the part of the generator up to the
next `yield` or to the end.

Several buckets may be in reduction at the same time, but every rank must issue the same collectives in the same order. There
are two ways to resume a generator:

1. Most groups of Syncline run all collectives in one order on every rank, also collectives that callbacks issue
   (`has_total_order`; see Note [One total order] in `syncline.collectives.engine.queue`). In these groups, a callback of each
   work's future resumes the generator; see `_chained`.
2. torch's groups order collectives by the time of the call. In these groups, only the thread of backward resumes generators;
   see `Pipeline`. When a bucket starts, the generator of every earlier bucket runs one more stage. When the last bucket starts,
   all generators run to their end.

Over NCCL, a callback runs as soon as the collective is issued, on another CUDA stream, which waits for the collective. So a
stage may run on another stream than the stage that made its tensors. A stage calls `used_here` for the tensors that an earlier
stage made. torch does the same for the result of the collective.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from syncline.collectives import MisuseError, ProcessGroup, Work
from syncline.collectives.internal import fail_future, new_future

from .contract import Bucket, TensorFuture

if TYPE_CHECKING:
    Stages: TypeAlias = Generator[Work, None, torch.Tensor]
else:
    Stages = Generator


def finished(tensor: torch.Tensor) -> TensorFuture:
    """Return a future that already has the result `tensor`."""
    future = new_future([tensor])
    future.set_result(tensor)
    return future


def used_here(tensors: Iterable[torch.Tensor]) -> None:
    """Tell torch's allocator that the current stream uses these tensors of an earlier stage, perhaps made on another stream.

    Without this call, the memory of a dropped tensor goes back at once to the stream that made the tensor. This stream could
    overwrite the memory before the GPU has run the present stage.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class Pipeline:
    """Runs a hook's generators, one for each bucket. Several generators may run at a time. See Note [Stages]."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._latest = -1

    def run(self, stages: Stages, group: ProcessGroup, bucket: Bucket) -> TensorFuture:
        """Start a bucket's generator. Call `run` in backward's thread, for the same buckets in the same order on every rank.

        If the first stage fails, `run` raises the stage's error. If a later stage fails, the returned future gets the stage's
        error.
        """
        future = new_future([bucket.buffer()])
        if group.has_total_order:
            _chained(stages, next(stages), future)
            return future
        # Indices rise within a backward. If an index does not rise, an earlier backward ended before its last bucket.
        if bucket.index() <= self._latest:
            self._drop_stale()
        self._latest = bucket.index()
        # Here every rank moves every earlier bucket on by one stage; see Note [Stages].
        for entry in self._pending:
            entry.advance()
        self._pending.append(_Pending(stages, next(stages), future))
        # After the last bucket, nothing else resumes the generators. All buckets move on stage by stage, so that every rank
        # issues their collectives in the same order.
        while bucket.is_last() and self._pending:
            for entry in self._pending:
                entry.advance()
            self._pending = [entry for entry in self._pending if not entry.future.done()]
        self._pending = [entry for entry in self._pending if not entry.future.done()]
        return future

    def _drop_stale(self) -> None:
        for entry in self._pending:
            fail_future(entry.future, MisuseError("the backward that issued this bucket ended before its last bucket"))
        self._pending = []


class _Pending:
    def __init__(self, stages: Stages, first: Work, future: TensorFuture) -> None:
        self.future = future
        self._stages = stages
        self._work = first

    def advance(self) -> None:
        """Wait for the work. Then resume the generator, which issues its next collective or returns its result."""
        if self.future.done():
            return
        try:
            self._work.wait()
            self._work = next(self._stages)
        except StopIteration as end:
            self.future.set_result(end.value)
        except Exception as error:  # noqa: BLE001 - whoever waits for the bucket gets the error
            fail_future(self.future, error)


def _chained(stages: Stages, first: Work, future: TensorFuture) -> None:
    def advance(previous: torch.futures.Future[Any]) -> None:
        try:
            previous.value()
            work = next(stages)
        except StopIteration as end:
            future.set_result(end.value)
        # Catch Ctrl-C, too: torch would only print the error, and no other code completes the future.
        except BaseException as error:  # noqa: BLE001 - whoever waits for the bucket gets the error
            fail_future(future, error)
        else:
            work.get_future().add_done_callback(advance)

    first.get_future().add_done_callback(advance)
