"""Trace a model's steps, from the first clock measurement to the merged file."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import torch

from syncline.collectives import ProcessGroup, SynclineError
from syncline.collectives.internal import message_device
from syncline.reducer import IterationStatistics, Reducer

from .clock import measure_offset
from .part import Header
from .recorder import StepRecorder
from .settings import STEPS_VARIABLE, TraceSettings
from .trace_file import write_trace

logger = logging.getLogger("syncline.ddp")


class TraceRecording:
    """Traces the steps of one model on this rank. The constructor is a collective of the group.

    ::

        construction             the ranks agree on a name for the run, and compare their clocks (see `measure_offset`)
        step `first` .. `last`   each rank records its events, and writes them to its own file
        the next step            the ranks compare their clocks again, and rank 0 merges all files into `trace.json`

    A step is a backward that averages gradients. If a file cannot be written, the rank logs a warning, and training continues.

    Args:
        reducer: the reducer of the model. The recording does not keep the reducer alive.
        only_first: trace only if no other model of this process has reached step `first` before.

    Attributes:
        ranks_may_differ: whether a rank may have fewer steps than the other ranks. If so, the trace issues no more collectives,
            and rank 0 does not merge the files; `syncline trace` can merge them later.
    """

    def __init__(
        self,
        settings: TraceSettings,
        group: ProcessGroup,
        reducer: Reducer,
        parameters: Collection[torch.Tensor],
        *,
        only_first: bool = False,
    ) -> None:
        self.settings = settings
        self._only_first = only_first
        self.ranks_may_differ = False
        self._group = group
        self._reducer = weakref.ref(reducer)
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._steps = 0
        self._is_over = False
        self._recorder: StepRecorder | None = None
        self._end_at_exit: weakref.finalize[..., TraceRecording] | None = None
        self._run = _agree_on_run(group)
        self._clock = measure_offset(group)
        if only_first:
            _tell_at_exit_if_nothing_was_traced(settings, group.rank)
        if settings.first == 1:
            self._start()

    def note_step(self, statistics: IterationStatistics) -> None:
        """Record a step after its backward. The call for the first step after the traced steps is a collective."""
        self._steps += 1
        if self._is_over:
            return
        first, last = self.settings.first, self.settings.last
        # The step before step `first` has ended, so everything from here on belongs to step `first`.
        if self._steps == first - 1:
            self._start()
        elif last is not None and self._steps > last:
            if self._recorder is not None:
                # Calls up to this step's forward still belong to the last traced step.
                self._recorder.note_end_of_steps(statistics)
            self.finish()
        elif self._steps >= first and self._recorder is not None:
            self._try(lambda recorder: recorder.note_step(self._steps, statistics))

    def finish(self) -> None:
        """End the trace. A second call does nothing.

        If `ranks_may_differ` is False, this is a collective, and rank 0 merges the ranks' files. Otherwise this rank only
        closes its own file.
        """
        if self._is_over:
            return
        self._is_over = True
        # Other ranks may be in another step, so no collective may follow.
        if self.ranks_may_differ:
            self._close(is_complete=False)
            return
        if self._recorder is not None:
            self._recorder.close_step()
        # `close_step` was called before this measurement, so the messages of the measurement belong to no step.
        clock = measure_offset(self._group)
        if self._recorder is not None:
            self._recorder.note_clock(clock)
        self._close(is_complete=True)
        # After the barrier, the files of all ranks are complete.
        self._group.barrier()
        if self._group.rank == 0:
            self._merge()

    def abandon(self) -> None:
        """End the trace on this rank without a collective: write this rank's events, but do not merge files."""
        self._is_over = True
        self._close(is_complete=False)

    def _start(self) -> None:
        reducer = self._reducer()
        # The reducer was deleted with its model, so no steps follow.
        if reducer is None:
            return
        if self._only_first and not _is_first_to_trace(self.settings, self._group.rank):
            self._is_over = True
            return
        parameters = [parameter for reference in self._parameters if (parameter := reference()) is not None]
        try:
            self._recorder = StepRecorder(self.settings.folder, self._header(), self._group, reducer, parameters)
        except OSError as error:
            _warn(error, self.settings, self._group.rank)
            return
        self._recorder.note_clock(self._clock)
        # If the program ends or the model is deleted before the last step, write the recorded events at that moment.
        self._end_at_exit = weakref.finalize(self, _end, self._recorder, self.settings, self._group.rank)

    def _close(self, *, is_complete: bool) -> None:
        if self._recorder is None:
            return
        self._try(lambda recorder: recorder.end(is_complete=is_complete))
        self._recorder = None
        if self._end_at_exit is not None:
            self._end_at_exit.detach()

    def _try(self, action: Callable[[StepRecorder], object]) -> None:
        assert self._recorder is not None
        try:
            action(self._recorder)
        except OSError as error:
            with suppress(OSError):  # `end` stops observing before it writes; a second error of the file does no harm
                self._recorder.end(is_complete=False)
            self._recorder = None
            _warn(error, self.settings, self._group.rank)

    def _merge(self) -> None:
        first, last = self.settings.first, self.settings.last
        # The folder may hold the files of an earlier run, which are not the trace of these steps.
        if self._steps < first:
            logger.warning(
                "nothing was traced to %s: the model made %d steps, and the first step to trace is step %d",
                self.settings.folder,
                self._steps,
                first,
            )
            return
        try:
            path = write_trace(self.settings.folder)
        except SynclineError as error:
            logger.warning(
                "the trace was not merged: %s. Bring the ranks' files into one folder, and run syncline trace", error
            )
        else:
            # This code runs after the step that follows the last traced step, so `_steps` may be above `last`.
            traced = self._steps if last is None else min(self._steps, last)
            logger.info("traced steps %d to %d: open %s in ui.perfetto.dev", first, traced, path)

    def _header(self) -> Header:
        group = self._group
        epoch_s = time.time() - time.perf_counter()
        return Header(group.rank, group.size, socket.gethostname(), os.getpid(), group.describe(), epoch_s, self._run)


def _end(recorder: StepRecorder, settings: TraceSettings, rank: int) -> None:
    # An error that is raised while the interpreter exits would end an MPI job with an error status.
    try:
        was_open = recorder.end(is_complete=False)
    except OSError as error:
        _warn(error, settings, rank)
        return
    if not was_open or rank != 0:
        return
    # The file was made after step `first` - 1. Then no step followed.
    if not recorder.has_steps:
        logger.warning(
            "nothing was traced to %s: the program ended, or the model was deleted, before the end of step %d",
            settings.folder,
            settings.first,
        )
    else:
        logger.warning(
            "the trace was not merged: the program ended, or the model was deleted, before the step after the last traced "
            "step. Run syncline trace %s",
            settings.folder,
        )


def _warn(error: OSError, settings: TraceSettings, rank: int) -> None:
    logger.warning("rank %d cannot write its trace to %s (%s); training goes on without it", rank, settings.folder, error)


def _agree_on_run(group: ProcessGroup) -> str:
    """A collective. Return a name that is the same on all ranks."""
    number = torch.tensor([time.time_ns()], dtype=torch.int64, device=message_device(group))
    group.broadcast(number, 0)
    return f"{int(number):016x}"  # all names have one length, so the order of texts is the order of runs


_traced: set[tuple[Path, int]] = set()
_asked: set[tuple[Path, int]] = set()


def _is_first_to_trace(settings: TraceSettings, rank: int) -> bool:
    key = settings.folder, rank
    if key in _traced:
        logger.info("another model of this process is traced to %s already; trace this one with its method `trace`", key[0])
        return False
    _traced.add(key)
    return True


def _tell_at_exit_if_nothing_was_traced(settings: TraceSettings, rank: int) -> None:
    key = settings.folder, rank
    if rank == 0 and key not in _asked:
        _asked.add(key)
        atexit.register(_tell_if_nothing_was_traced, key, settings.first)


def _tell_if_nothing_was_traced(key: tuple[Path, int], first: int) -> None:
    if key not in _traced:
        logger.warning(
            "nothing was traced to %s: no model came to step %d; say which steps by %s=FIRST-LAST",
            key[0],
            first,
            STEPS_VARIABLE,
        )
