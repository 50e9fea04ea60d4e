"""A call: its scope ends its waits, its signature says what it is, its record is what is told of it."""

from __future__ import annotations

import atexit
import functools
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic
from types import CodeType, FrameType
from typing import Any, Generic, NamedTuple, TypeVar
from zlib import crc32

import torch

from ..errors import InvalidArgumentError
from ..reduce_op import Reduction

DEFAULT_TIMEOUT_S = 1800.0
# The thread that waits asks `ask` for the first time after _PATIENCE_S, then every _ASK_S: most calls end before that.
_PATIENCE_S = 0.05
_ASK_S = 0.01

T = TypeVar("T")


def seconds(timeout: timedelta | float | None, default_s: float = DEFAULT_TIMEOUT_S) -> float:
    """Convert a public `timeout` argument (a timedelta as in torch, or seconds) to seconds.

    Raises:
        InvalidArgumentError: it is zero, negative or not a number.
    """
    if timeout is None:
        return default_s
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if math.isnan(timeout_s) or timeout_s <= 0:
        raise InvalidArgumentError(f"a timeout must be a positive number of seconds or a timedelta, found {timeout!r}")
    return timeout_s


class CancelScope:
    """Ends a wait: after `timeout_s` seconds, or when somebody cancels it with a reason.

    The thread that waits calls `check` between two looks. Any thread may call `cancel`.

    Args:
        timeout_s: seconds from now.
        ask: returns the reason why the wait is in vain, or None. The waiting thread asks it now and then.

    Attributes:
        ask: as given; whoever keeps the scope when the wait is over sets it to None.
        reason: the exception that `check` raises; None while nobody has cancelled the scope.
        was_noticed: whether `check` has raised. The monitor leaves such a call alone for longer.
    """

    # Every call makes one, and most calls end before anybody checks: the defaults stand in the class.
    __slots__ = ("__dict__", "_end_s", "ask", "timeout_s")
    reason: BaseException | None = None
    was_noticed = False
    _next_ask_s: float | None = None

    def __init__(self, timeout_s: float, ask: Callable[[], BaseException | None] | None = None) -> None:
        self.timeout_s = timeout_s
        self._end_s = monotonic() + timeout_s
        self.ask = ask

    def cancel(self, reason: BaseException) -> None:
        """End the scope now. The first reason counts."""
        if self.reason is None:
            self.reason = reason
        self._end_s = -math.inf

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end_s - monotonic())

    def is_over(self) -> bool:
        """Whether the time limit was reached, or somebody has cancelled the scope."""
        return self.reason is not None or monotonic() >= self._end_s

    def check(self, what: str = "the time limit was reached") -> None:
        """Return if the scope goes on.

        Args:
            what: the text of the `TimeoutError`: what is known of the other ranks.

        Raises:
            TimeoutError: the time limit was reached.
            BaseException: the reason with which somebody has cancelled the scope, or that `ask` has given.
        """
        now_s = monotonic()
        if self._next_ask_s is None:
            self._next_ask_s = now_s + _PATIENCE_S
        if self.reason is None and self.ask is not None and now_s >= self._next_ask_s:
            self._next_ask_s = now_s + _ASK_S
            reason = self.ask()
            if reason is not None:
                self.cancel(reason)
        if now_s >= self._end_s or self.reason is not None:
            self.was_noticed = True
            if self.reason is not None:
                raise self.reason
            raise TimeoutError(what)


class DetachedCall(Generic[T]):
    """Calls a function once, on a thread of its own, which is left behind if the function never returns.

    For libraries that block in C code and cannot be asked to stop. `wait` is how a thread blocks but ends when its scope ends.
    At the end of the process such threads get a few seconds to come back: a thread that is inside torch when the interpreter is
    taken down crashes the process.

    Args:
        function: what is called. It is not held after the call.
        name: of the thread, a daemon.
        context: is entered around the call, on its thread.

    Attributes:
        done: is set when the function has returned or raised.
    """

    def __init__(
        self, function: Callable[[], T], name: str, context: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.done = threading.Event()
        thread = threading.Thread(target=self._run, args=(function, context), name=name, daemon=True)
        _detached.add(thread)
        thread.start()

    def wait(self, scope: CancelScope, look_s: float = 0.1, what: str = "the library did not return") -> T:
        """Block until the function has returned, and return its result; end when the scope ends.

        Args:
            scope: is checked every `look_s` seconds.
            look_s: seconds.
            what: as for `CancelScope.check`.

        Raises:
            BaseException: what the function raised, or what `CancelScope.check` raises.
        """
        while not self.done.wait(min(look_s, max(scope.remaining_s(), 1e-3))):
            scope.check(what)
        return self.result()

    def result(self) -> T:
        """What the function returned; raises what it raised. Call it when `done` is set."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self, function: Callable[[], T], context: Callable[[], AbstractContextManager[object]]) -> None:
        try:
            with context():
                self._result.append(function())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            self._error = error
        self.done.set()


_EXIT_S = 5.0
_detached: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _finish_detached() -> None:
    """Wait for all of them, together no longer than `_EXIT_S` seconds."""
    scope = CancelScope(_EXIT_S)
    for thread in list(_detached):
        if thread.is_alive():
            thread.join(scope.remaining_s())


if hasattr(os, "register_at_fork"):  # the parent's threads do not run in a forked child
    os.register_at_fork(after_in_child=_detached.clear)


class Signature(NamedTuple):
    """What one call of a collective does, without its tensors. Hashable.

    A tuple, because every call makes one and looks up its plan by it; a frozen dataclass costs four times as much.

    Attributes:
        name: the method's name, such as "all_reduce".
        op: the reduction; None if there is none.
        root: the root's rank in the group; None if there is none.
        dtype: of the tensor that stands for the call; None if no tensor does.
        shape: of that tensor.
        device_type: where the call's tensors are, such as "cpu".
        detail: what else the ranks must agree on, such as "dtype=torch.int8"; empty if nothing.
        splits: for an all-to-all, how many elements this rank gets from and sends to each rank. Each rank has its own.
    """

    name: str
    op: Reduction | None = None
    root: int | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    device_type: str = "cpu"
    detail: str = ""
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @classmethod
    def of(
        cls, name: str, tensor: torch.Tensor, op: Reduction | None = None, root: int | None = None, detail: str = ""
    ) -> Signature:
        """The signature of a call for which this tensor stands."""
        return cls(name, op, root, tensor.dtype, tensor.shape, device_type_of(tensor), detail)

    # What follows is for those who know that the collective has one.

    @property
    def reduction(self) -> Reduction:
        """The reduction."""
        assert self.op is not None
        return self.op

    @property
    def root_rank(self) -> int:
        """The root's rank in the group."""
        assert self.root is not None
        return self.root

    @property
    def element_dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        assert self.dtype is not None
        return self.dtype

    @property
    def numel(self) -> int:
        """The number of elements of the tensor that stands for the call."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of that tensor; 0 if there is none."""
        return 0 if self.dtype is None else self.numel * self.dtype.itemsize

    def digest(self) -> int:
        """32 bits of what must be the same on all ranks, so that no rank gets wrong results.

        Of a tensor, the dtype and the number of elements count. Shapes may differ, as in torch.distributed; only `check_calls`
        compares them, too.
        """
        return _digest(self.name, self.op, self.root, self.dtype, self.detail, None if self.dtype is None else self.numel)

    def __str__(self) -> str:
        """In words: "all_reduce(float32[10, 3], op=SUM)"."""
        words = (
            "" if self.dtype is None else f"{dtype_in_words(self.dtype)}{list(self.shape)}",
            "" if self.op is None else f"op={self.op.name}",
            "" if self.root is None else f"root={self.root}",
            self.detail,
        )
        return f"{self.name}({', '.join(filter(None, words))})"


def device_type_of(tensor: torch.Tensor) -> str:
    """Where the tensor is, such as "cpu"."""
    return "cpu" if tensor.is_cpu else tensor.device.type  # the first question costs a third of the second


@functools.lru_cache(maxsize=4096)
def _digest(
    name: str, op: Reduction | None, root: int | None, dtype: torch.dtype | None, detail: str, numel: int | None
) -> int:
    return crc32(repr((name, dtype, op, root, detail, numel)).encode())


def dtype_in_words(dtype: torch.dtype) -> str:
    """A dtype without torch's prefix: "float32"."""
    return str(dtype).removeprefix("torch.")


def tensor_in_words(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape: "float32[10, 3]"."""
    return f"{dtype_in_words(tensor.dtype)}{list(tensor.shape)}"


QUEUED, RUNNING, DONE, FAILED = "queued", "running", "done", "failed"

# Modules whose frames are not the user's program.
_LIBRARIES = ("syncline.", "torch.")


class Call:
    """One issue of a collective on this rank.

    The group makes it, its thread runs it, the recorder keeps it, and the monitor looks at its scope. It holds its tensors only
    until it is over, so that the record keeps no memory alive.

    Args:
        signature: what is called.
        number: the count of calls that this rank has issued; None if not all ranks of the group issue this one.
        reads: tensors that are only read.
        writes: tensors that are written, or read and written.
        mark: what the call says of itself beyond its signature; see `ProcessGroup.marked`. No part of the signature, because a
            call with a mark has the same plan as one without.

    Attributes:
        position: the call's place in the group's total order, from 0; None while it has not begun.
        state: QUEUED, RUNNING, DONE or FAILED.
        issued_at: seconds since the epoch, by this rank's clock.
        scope: ends the call's waits; None while it has not begun.
    """

    __slots__ = (
        "__weakref__",
        "_code",
        "_instruction",
        "issued_at",
        "mark",
        "number",
        "position",
        "reads",
        "scope",
        "signature",
        "state",
        "writes",
    )

    def __init__(
        self,
        signature: Signature,
        number: int | None = None,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        scope: CancelScope | None = None,
        mark: str | None = None,
    ) -> None:
        self.signature = signature
        self.mark = mark
        self.number = number
        self.reads = reads
        self.writes = writes
        self.scope: CancelScope = scope  # type: ignore[assignment]  # whoever runs the call sets it first
        self.position: int | None = None
        self.state = QUEUED
        self.issued_at = time.time()
        self._code, self._instruction = _users_line()

    def is_over(self, state: str) -> None:
        """The call has ended in this state. It lets go of its tensors."""
        self.state = state
        self.reads = self.writes = ()

    def release(self) -> None:
        """Let go of the tensors; the call may go on, on the stream of a device that keeps their memory until it is over."""
        self.reads = self.writes = ()

    def digest(self) -> int:
        """32 bits of what must be the same on all ranks: of the signature, and of the mark if there is one."""
        digest = self.signature.digest()
        return digest if self.mark is None else crc32(self.mark.encode(), digest)

    @property
    def words(self) -> str:
        """What is called: "all_reduce(float32[10, 3], op=SUM)", with the mark at the end if there is one."""
        words = str(self.signature)
        if self.mark is None:
            return words
        return f"{words[:-1]}{'' if words.endswith('()') else ', '}{self.mark})"

    def __str__(self) -> str:
        """In words: "all_reduce(float32[10, 3], op=SUM), number 7"."""
        return self.words if self.number is None else f"{self.words}, number {self.number}"

    def record(self) -> CallRecord:
        """What is told of the call."""
        signature = self.signature
        return CallRecord(
            self.number,
            self.position,
            signature.name,
            self.words,
            self.digest(),
            self.state,
            self.issued_at,
            self.where,
        )

    @property
    def where(self) -> str:
        """File and line of the user's program that issued the call, such as "train.py:88"; "?" if no frame is the user's."""
        code = self._code
        if code is None:
            return "?"
        spans = code.co_lines()
        line = next((line for start, stop, line in spans if start <= self._instruction < stop and line is not None), None)
        return f"{Path(code.co_filename).name}:{code.co_firstlineno if line is None else line}"  # paths differ between hosts


def _users_line() -> tuple[CodeType | None, int]:
    """The innermost function of the user's program, and the instruction where it is: less work than a line number."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None, 0


@dataclass(frozen=True)
class CallRecord:
    """One call of one rank, as other ranks and reports are told of it.

    Attributes:
        number: as `Call.number`.
        position: as `Call.position`.
        name: the method's name, such as "all_reduce".
        words: the signature in words.
        digest: what must be the same on all ranks; see `Call.digest`.
        state: as `Call.state`.
        issued_at: as `Call.issued_at`.
        where: file and line of the program, such as "train.py:88".
    """

    number: int | None
    position: int | None
    name: str
    words: str
    digest: int
    state: str
    issued_at: float
    where: str

    def __str__(self) -> str:
        """In words: "all_reduce(float32[10, 3], op=SUM) #7 at train.py:88"."""
        place = "" if self.position is None else f" #{self.position}"
        return f"{self.words}{place} at {self.where}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CallRecord:
        """What `as_dict` gave, after JSON.

        Raises:
            KeyError, TypeError: it is something else.
        """
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})
