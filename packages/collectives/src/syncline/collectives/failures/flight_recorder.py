"""FlightRecorder: the last calls of one group on this rank."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from sys import _getframe
from time import time
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch

from ..contract.reduce_op import Reduction
from .call_record import DONE, FAILED, QUEUED, RUNNING, CallRecord

MOST_CALLS = 256

#: What calls of one kind have in common: name, dtype, op, root, detail.
What: TypeAlias = tuple[str, torch.dtype | None, Reduction | None, int | None, str]

#: number, what, shape, time of issue, code and instruction of the caller, position, state.
#: A list, because to make one takes a fifth of the time that an object takes.
Entry: TypeAlias = list[Any]
NUMBER = 0
_ISSUED_AT = 3
_POSITION = 6
STATE = 7

# Files of ours and of torch are not the user's program. Known by their path, which is looked up once for each function.
_OURS = (str(Path(__file__).parents[2]) + os.sep, str(Path(torch.__file__).parent) + os.sep)
_MOST_FUNCTIONS = 4096


class _IsLibrary(dict[CodeType, bool]):
    """Whether a function is ours or torch's."""

    def __missing__(self, code: CodeType) -> bool:
        if len(self) >= _MOST_FUNCTIONS:
            self.clear()
        known = self[code] = code.co_filename.startswith(_OURS)
        return known


_is_library = _IsLibrary()


def _outside(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """The first function of the user's program from a frame on upwards, and where it is."""
    while frame is not None and _is_library[frame.f_code]:
        frame = frame.f_back
    return (None, 0) if frame is None else (frame.f_code, frame.f_lasti)


class CallCount:
    """Counts the calls of a group that have begun and that all ranks issue.

    Attributes:
        begun: how many; the position of the next one in the group's total order.
    """

    __slots__ = ("begun",)

    def __init__(self) -> None:
        self.begun = 0


class FlightRecorder:
    """A ring of the last `MOST_CALLS` calls. It holds no tensor.

    Any thread may call. `begin` and `end` are called for one call after the other, in the group's total order.

    Args:
        group_name: how messages call the group.
        rank: this rank in the group.
        ranks: for each rank of the group its rank in the job.
        count: counts the calls that begin; by default one of its own.
    """

    def __init__(self, group_name: str, rank: int, ranks: Sequence[int], count: CallCount | None = None) -> None:
        self.group_name = group_name
        self.rank = rank
        self.ranks = tuple(ranks)
        self.count = count or CallCount()
        self._ring: deque[Entry] = deque(maxlen=MOST_CALLS)
        self._append = self._ring.append
        self._latest_caller: CodeType | None = None  # known to be the user's program
        self._latest_form: CodeType | None = None  # known not to be

    def issue(
        self,
        number: int | None,
        name: str,
        tensor: torch.Tensor | None,
        op: Reduction | None = None,
        root: int | None = None,
        detail: str = "",
        *,
        depth: int = 2,
    ) -> Entry:
        """Note a call that this thread issues.

        Args:
            number: of its issue; None if not all ranks of the group issue such calls.
            name: of the collective.
            tensor: the tensor that stands for the call, if one does.
            op: the reduction, if there is one.
            root: the root, if there is one.
            detail: what else there is to agree on.
            depth: the user's program is at least so many frames up, which need not be looked at.
        """
        dtype, shape = (None, ()) if tensor is None else (tensor.dtype, tensor.shape)
        return self.issue_kind(number, (name, dtype, op, root, detail), shape, depth + 1)

    def issue_kind(self, number: int | None, what: What, shape: Sequence[int], depth: int = 2) -> Entry:
        """`issue` by those who know the kind of the call.

        A loop calls from one function again and again, perhaps by one of our functional forms. Both are compared with the
        latest, which is cheaper than a look-up.
        """
        try:
            frame = _getframe(depth)
        except ValueError:  # the thread runs a function of ours and nothing else
            frame = _getframe()  # which is ours, so nobody is named
        code: CodeType | None = frame.f_code
        if code is self._latest_form and (caller := frame.f_back) is not None:
            frame, code = caller, caller.f_code
        if code is self._latest_caller:
            instruction = frame.f_lasti
        else:
            if _is_library[frame.f_code]:
                self._latest_form = code
            code, instruction = _outside(frame)
            self._latest_caller = code
        entry = [number, what, shape, time(), code, instruction, None, QUEUED]
        self._append(entry)
        return entry

    def begin(self, entry: Entry) -> None:
        """The call begins to run; if all ranks issue it, it has its position in the total order from now on."""
        if entry[NUMBER] is not None:
            count = self.count
            entry[_POSITION] = count.begun
            count.begun += 1
        entry[STATE] = RUNNING

    def end(self, entry: Entry) -> None:
        """The call has succeeded."""
        entry[STATE] = DONE

    def fail(self, entry: Entry) -> None:
        """The call has failed."""
        entry[STATE] = FAILED

    def latest(self) -> float:
        """When the last call was issued, in seconds since the epoch; 0 if there is none."""
        try:
            return float(self._ring[-1][_ISSUED_AT])
        except IndexError:
            return 0.0

    def running(self) -> CallRecord | None:
        """The latest call that runs; None if none does."""
        entry = next((entry for entry in reversed(self._entries()) if entry[STATE] == RUNNING), None)
        return None if entry is None else _as_record(list(entry))

    def records(self) -> list[CallRecord]:
        """The calls that are remembered, in the order of their issue."""
        return [_as_record(list(entry)) for entry in self._entries()]

    def _entries(self) -> list[Entry]:
        while True:
            try:
                return list(self._ring)
            except RuntimeError:  # another thread has issued a call meanwhile
                continue


def _as_record(entry: Entry) -> CallRecord:
    number, (name, dtype, op, root, detail), shape, issued_at, code, instruction, position, state = entry
    return CallRecord(
        number,
        position,
        name,
        "" if dtype is None else str(dtype).removeprefix("torch."),
        tuple(shape),
        "" if op is None else op.name,
        root,
        detail,
        state,
        issued_at,
        "?" if code is None else _in_source(code, instruction),
    )


def _in_source(code: CodeType, instruction: int) -> str:
    """File and line; the file's name only, for the path is another on each host."""
    lines = (line for start, stop, line in code.co_lines() if start <= instruction < stop and line is not None)
    return f"{Path(code.co_filename).name}:{next(lines, code.co_firstlineno)}"
