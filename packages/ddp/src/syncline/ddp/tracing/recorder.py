"""Record this rank's traced steps, and write them to the rank's file."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from syncline.collectives import ProcessGroup
from syncline.reducer import IterationStatistics, Reducer

from .call_log import CallLog
from .clock import ClockOffset
from .events import BucketEvent, BucketLayout, CallEvent, OptimizerEvent, StepEvent
from .optimizer_steps import OptimizerSteps
from .part import Header, clock_line, end_line, header_line, layout_line, part_path, step_line

_WRITE_EVERY_S = 1.0
"""The seconds between two writes to the file. A killed job may lose this part of its trace."""


@dataclass
class _OpenStep:
    """A step whose backward is over. Events before the next step's forward still belong to this step."""

    number: int
    layout: int
    statistics: IterationStatistics
    optimizers: list[OptimizerEvent]
    calls: list[CallEvent]

    def close(self) -> StepEvent:
        seen = self.statistics
        buckets = [
            BucketEvent(one.number, one.nbytes, one.ready, one.started, seen.finished if one.finished is None else one.finished)
            for one in seen.buckets
        ]
        return StepEvent(
            self.number,
            self.layout,
            seen.forward_started,
            seen.forward_ended,
            seen.backward_started,
            seen.last_gradient,
            seen.finalize_started,
            seen.finished,
            seen.waited_s,
            tuple(buckets),
            tuple(self.optimizers),
            tuple(self.calls),
        )


class StepRecorder:
    """Records this rank's steps, and the events between the steps, from construction until `end`.

    Args:
        folder: the folder for the file. A missing folder is created.
        reducer: the reducer of the traced model. The recorder does not keep the reducer alive.
        parameters: the model's parameters. The steps of their optimizers are recorded.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self, folder: Path, header: Header, group: ProcessGroup, reducer: Reducer, parameters: Collection[torch.Tensor]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pid = header.pid
        self._file = part_path(folder, header.rank).open("w", encoding="utf-8")
        # The lines are functions: the text of a line is made when the line is written, not within a step.
        self._lines: list[Callable[[], str]] = [lambda: header_line(header)]
        self._write()
        self._reducer: Reducer = weakref.proxy(reducer)
        self._buckets: Sequence[object] = ()
        self._layouts = 0
        self._open_step: _OpenStep | None = None
        self._calls = CallLog(group, self._reducer)
        self._optimizers = OptimizerSteps(parameters)

    @property
    def has_steps(self) -> bool:
        """Whether a step was recorded."""
        return self._layouts > 0

    def note_clock(self, clock: ClockOffset) -> None:
        """Record a measurement of this rank's clock."""
        self._lines.append(lambda: clock_line(clock))

    def note_step(self, number: int, statistics: IterationStatistics) -> None:
        """Record step `number`. Call this method after the step's backward."""
        # Events before this step's forward belong to the previous step.
        optimizers, calls = self._optimizers.take(), self._calls.take()
        began = statistics.forward_started
        self._close_step([one for one in optimizers if one.started < began], [one for one in calls if one.started < began])
        self._note_layout()
        self._open_step = _OpenStep(
            number,
            self._layouts - 1,
            statistics,
            [one for one in optimizers if one.started >= began],
            [one for one in calls if one.started >= began],
        )
        if time.perf_counter() - self._written_at > _WRITE_EVERY_S:
            self._write()

    def note_end_of_steps(self, statistics: IterationStatistics) -> None:
        """Close the last traced step. Call this method after the backward of the next step.

        `statistics` are the statistics of the next step, which is not traced.
        """
        began = statistics.forward_started
        self._close_step(
            [one for one in self._optimizers.take() if one.started < began],
            [one for one in self._calls.take() if one.started < began],
        )

    def close_step(self) -> None:
        """Close the open step. Later events do not belong to any step."""
        self._close_step(self._optimizers.take(), self._calls.take())

    def end(self, *, is_complete: bool) -> bool:
        """Close the open step, stop recording, and close the file. A second call does nothing.

        Return whether this call has closed the file.
        """
        # A forked child that ends by `sys.exit` also calls this method. The file belongs to the parent, which still writes to
        # it.
        if self._file.closed or os.getpid() != self._pid:
            return False
        self.close_step()
        self._calls.stop()
        self._optimizers.stop()
        if is_complete:
            self._lines.append(end_line)
        try:
            self._write()
        finally:
            self._file.close()
        return True

    def _close_step(self, optimizers: Sequence[OptimizerEvent], calls: Sequence[CallEvent]) -> None:
        if self._open_step is None:
            return
        self._open_step.optimizers += optimizers
        self._open_step.calls += calls
        step, self._open_step = self._open_step, None
        self._lines.append(lambda: step_line(step.close()))

    def _note_layout(self) -> None:
        buckets = self._reducer.buckets
        # The reducer makes a new list when it builds buckets anew.
        if buckets is not self._buckets:
            self._buckets = buckets
            self._layouts += 1
            layout = [
                BucketLayout(bucket.nbytes, tuple(bucket.names), tuple(tuple(one.shape) for one in bucket.parameters))
                for bucket in buckets
            ]
            self._lines.append(lambda: layout_line(layout))

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        self._file.write("".join(line() for line in lines))
        self._file.flush()
        self._written_at = time.perf_counter()
