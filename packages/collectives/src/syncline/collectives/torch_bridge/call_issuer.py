"""CallIssuer turns calls of torch into collectives of our group."""

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

# How many of the latest works a group keeps alive; see Note [A work that only C++ holds].
_WORKS_KEPT = 64
# With torch 2.6: how many works a group keeps alive at most for which nobody has waited yet.
_UNASKED_KEPT = 1024

# These calls concern only two ranks. They are not counted, because the counts of ranks would differ.
_TRANSFERS = frozenset({"send", "recv", "recvAnySource"})

# The result of a call that has finished: torch only calls its `wait`.
_FINISHED = TorchSideWork(FinishedWork([]))


class CallIssuer(dist.ProcessGroup):
    """Issues collectives on our group `syncline_group`, and returns works to torch.

    Note [A work that only C++ holds]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Within `join(divide_by_initial_world_size=False)`, torch's DDP passes the work of an all-reduce of one number to its
    reducer, which waits for the work in backward. Then no Python code holds the work. C++ keeps only the C++ half of the work,
    and the `wait` of this half would never return. So the group holds the latest works of this kind.

    In torch 2.6 the same happens with every work that C++ gets, and C++ may wait for a work long after the call. So with torch
    2.6 the group holds each work until somebody waits for the work or asks for its future. C++ may do both, one after the
    other. So after the first, the group still holds the latest of these works.

    Args:
        ours: our group, which becomes `syncline_group`.
        backend_name: the name under which torch knows the backend.
    """

    def __init__(self, ours: ProcessGroup, backend_name: str) -> None:
        super().__init__(ours.rank, ours.size)  # type: ignore[call-arg]  # the constructor with a store is not for Python
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
        if isinstance(opts, timedelta):  # some of torch's overloads have the time limit in place of the options
            opts, timeout = None, opts
        is_async = getattr(opts, "asyncOp", True)
        limit_s = time_limit_s(getattr(opts, "timeout", None) if timeout is None else timeout)
        # A blocking call with a time limit is also started without waiting: `work.wait` below has the limit.
        starts_only = is_async or limit_s is not None or self._coalesced is not None
        # A dispatch mode or a trace wants to see the call.
        if modes_active() or jit_trace() is not None:
            # Only a wait for a watched call's work copies the results. Inside coalescing, nobody waits for the work of a single
            # call. So issue the call unseen.
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
            # Keep the work of DDP's all-reduce of one number; see Note [A work that only C++ holds].
            if title == "all_reduce" and inputs[0].numel() == 1:
                self._kept.append(torchs)
            return torchs
        work.wait(limit_s)
        return _FINISHED

    def _held(self, work: Work, limit_s: float | None) -> TorchSideWork:
        """A torch work that this group keeps alive, because C++ does not; see Note [A work that only C++ holds]."""

        def asked(one: TorchSideWork) -> None:
            self._kept.append(one)
            self._unasked.pop(id(one), None)

        torchs = TorchSideWork(work, limit_s, on_asked=asked)
        self._unasked[id(torchs)] = torchs
        if len(self._unasked) > _UNASKED_KEPT:
            # Drop the oldest work. After so many later works, nobody will ask for it.
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
        """Join all calls until `_end_coalescing` into one work. Each call is still issued at once."""
        if self._coalesced is not None:
            raise MisuseError(f"coalescing on {self.syncline_group.place()} was started before; end that first")
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """The work of all calls since `_start_coalescing`."""
        works, self._coalesced = self._coalesced, None
        if works is None:
            raise MisuseError(f"coalescing on {self.syncline_group.place()} ends, but was not started")
        return self._held(CoalescedWork(works), None) if LOSES_WORKS else TorchSideWork(CoalescedWork(works))
