"""From a call of torch's to a collective of ours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..engine.observers import profiled
from ..errors import MisuseError
from ..group import ProcessGroup
from ..torch_internals import LOSES_WORKS, jit_trace, modes_active, profiler_runs
from ..work import FinishedWork, Work
from . import watched
from .options import time_limit_s
from .watched import Seen
from .works import CoalescedWork, TorchSideWork

Issue = Callable[[bool], Work]

# So many of the latest works are kept; see Note [A work that only C++ holds].
_WORKS_KEPT = 64
# Of works that nobody waits for, so many are kept.
_UNASKED_KEPT = 1024

# These concern two ranks, and are not counted: the ranks' counts would differ.
_TRANSFERS = frozenset({"send", "recv", "recvAnySource"})

# What a call that has finished returns: torch asks it for nothing but `wait`.
_FINISHED = TorchSideWork(FinishedWork([]))


class CallIssuer(dist.ProcessGroup):
    """Issues collectives on the group of ours, `syncline_group`, and gives torch its works.

    Note [A work that only C++ holds]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Within `join(divide_by_initial_world_size=False)` torch's DDP hands the work of an all-reduce of one number to its reducer,
    which waits for it in backward. Nobody in Python holds it then, and C++ keeps only its half of a work, whose `wait` would
    never return. So the group holds the latest works of this kind.

    In torch 2.6 the same goes for every work that C++ gets, and C++ may wait for one long after others. So there the group
    holds each work until it is waited for or asked for its future, and the latest of these a little longer: C++ may do both.

    Args:
        ours: the group.
        backend_name: the name under which torch knows the backend.
    """

    def __init__(self, ours: ProcessGroup, backend_name: str) -> None:
        super().__init__(ours.rank, ours.size)  # type: ignore[call-arg]  # the one with a store is not for Python
        self.syncline_group = ours
        self._backend_name = backend_name
        self._coalesced: list[Work] | None = None
        self._collectives_issued = 0
        self._kept: deque[dist.Work] = deque(maxlen=_WORKS_KEPT)
        self._unasked: dict[int, TorchSideWork] = {}

    def _issue(
        self,
        title: str,
        inputs: list[torch.Tensor],
        issue: Issue,
        opts: Any = None,
        timeout: timedelta | None = None,
        seen: Callable[[], Seen] | None = None,
    ) -> dist.Work:
        if isinstance(opts, timedelta):  # in the place of the options, as some of torch's forms have it
            opts, timeout = None, opts
        is_async = getattr(opts, "asyncOp", True)
        limit_s = time_limit_s(getattr(opts, "timeout", None) if timeout is None else timeout)
        starts_only = is_async or limit_s is not None or self._coalesced is not None
        if modes_active() or jit_trace() is not None:
            # What is coalesced is waited for without its own work, which would copy the results.
            shown = None if seen is None or self._coalesced is not None else seen()
            work = watched.issue(self, title, shown, lambda: self._issued(title, inputs, issue, starts_only))
        else:
            work = self._issued(title, inputs, issue, starts_only)
        if self._coalesced is not None:
            self._coalesced.append(work)
            return TorchSideWork(work, limit_s)
        if is_async:
            if LOSES_WORKS:
                return self._held(work, limit_s)
            torchs = TorchSideWork(work, limit_s)
            if title == "all_reduce" and inputs[0].numel() == 1:
                self._kept.append(torchs)
            return torchs
        work.wait(limit_s)
        return _FINISHED

    def _held(self, work: Work, limit_s: float | None) -> TorchSideWork:
        """A work of torch's that lives on where only C++ holds it."""

        def asked(one: TorchSideWork) -> None:
            self._kept.append(one)
            self._unasked.pop(id(one), None)

        torchs = TorchSideWork(work, limit_s, on_asked=asked)
        self._unasked[id(torchs)] = torchs
        if len(self._unasked) > _UNASKED_KEPT:
            self._unasked.pop(next(iter(self._unasked)))
        return torchs

    def _issued(self, title: str, inputs: list[torch.Tensor], issue: Issue, starts_only: bool) -> Work:
        if title not in _TRANSFERS:
            self._collectives_issued += 1
        if profiler_runs():
            work = profiled(f"{self._backend_name}:{title}", inputs, lambda: issue(starts_only), is_async=starts_only)
        else:
            work = issue(starts_only)
        watched.note_issued(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        """From here on, what is issued is one work for whoever waits. It is issued at once all the same."""
        if self._coalesced is not None:
            raise MisuseError(f"coalescing on {self.syncline_group.place()} was started before; end that first")
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """The work of all that was issued since `_start_coalescing`."""
        works, self._coalesced = self._coalesced, None
        if works is None:
            raise MisuseError(f"coalescing on {self.syncline_group.place()} ends, but was not started")
        return self._held(CoalescedWork(works), None) if LOSES_WORKS else TorchSideWork(CoalescedWork(works))
