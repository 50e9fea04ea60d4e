"""`Call`: one call of a collective, with its signature and its state. `CallRecord`: the call in reports and on other ranks."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from zlib import crc32

import torch

from ..reduce_op import Reduction
from .cancel_scope import CancelScope


class Signature(NamedTuple):
    """The properties of a call of a collective, without the tensors. A group keeps one plan for each signature.

    Attributes:
        name: the method's name, such as "all_reduce".
        op: the reduction, or None.
        root: the root's rank in the group, or None.
        dtype: the dtype of the main tensor (the method's argument `tensor` or `output`), or None.
        shape: the shape of the main tensor.
        device_type: the type of device of the tensors, such as "cpu".
        detail: other facts that must be equal on all ranks, such as "dtype=torch.int8", or "".
        splits: for an all-to-all, how many elements this rank receives from each rank, and how many it sends to each rank.
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
        r"""Return the signature of a call. `tensor` is the main tensor: the argument `tensor` or `output` of the method."""
        return cls(name, op, root, tensor.dtype, tensor.shape, device_type_of(tensor), detail)

    @property
    def reduction(self) -> Reduction:
        """The reduction. Read this property only if the collective reduces."""
        assert self.op is not None
        return self.op

    @property
    def root_rank(self) -> int:
        """The root's rank in the group. Read this property only if the collective has a root."""
        assert self.root is not None
        return self.root

    @property
    def element_dtype(self) -> torch.dtype:
        """The dtype of the main tensor. Read this property only if the call has a tensor."""
        assert self.dtype is not None
        return self.dtype

    @property
    def numel(self) -> int:
        """The number of elements of the main tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the main tensor; 0 if the call has no tensor."""
        return 0 if self.dtype is None else self.numel * self.dtype.itemsize

    def digest(self) -> int:
        """Return a checksum of 32 bits. If two ranks get different checksums, their calls do not match.

        The checksum covers the method, reduction, root, detail, dtype and number of elements, but not the shape.
        """
        return _digest(self)

    def __str__(self) -> str:
        """Return the signature as text: "all_reduce(float32[10, 3], op=SUM)"."""
        words = (
            "" if self.dtype is None else f"{dtype_in_words(self.dtype)}{list(self.shape)}",
            "" if self.op is None else f"op={self.op.name}",
            "" if self.root is None else f"root={self.root}",
            self.detail,
        )
        return f"{self.name}({', '.join(filter(None, words))})"


def device_type_of(tensor: torch.Tensor) -> str:
    """Return the type of the tensor's device, such as "cpu"."""
    return "cpu" if tensor.is_cpu else tensor.device.type  # `is_cpu` costs a third of `device.type`


@functools.lru_cache(maxsize=4096)
def _digest(signature: Signature) -> int:
    name, op, root, dtype, detail = signature.name, signature.op, signature.root, signature.dtype, signature.detail
    numel = None if dtype is None else signature.numel
    return crc32(repr((name, dtype, op, root, detail, numel)).encode())


def dtype_in_words(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix "torch.": "float32"."""
    return str(dtype).removeprefix("torch.")


def tensor_in_words(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype and shape as text: "float32[10, 3]"."""
    return f"{dtype_in_words(tensor.dtype)}{list(tensor.shape)}"


QUEUED, RUNNING, DONE, FAILED = "queued", "running", "done", "failed"

# Frames of these modules are not the user's program: `Call.where` skips them.
_LIBRARIES = ("syncline.", "torch.")


class Call:
    """One call of a collective that this rank has issued. When the call is over, this object keeps no tensor.

    Attributes:
        number: the call's number on this rank, from 0; None for calls that not all ranks of the group issue.
        reads: tensors that the call only reads.
        writes: tensors that the call writes.
        mark: a text for errors and for the comparison of calls, or None; see `ProcessGroup.marked`.
        position: the call's index, from 0, in the order in which the group runs its calls. None before the call begins, or
            if `number` is None.
        state: QUEUED, RUNNING, DONE or FAILED.
        issued_at: seconds since the epoch, by this rank's clock.
        scope: ends the call's waits; None before the call begins.
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
        self.scope: CancelScope = scope  # type: ignore[assignment]  # it is set before the call runs
        self.position: int | None = None
        self.state = QUEUED
        self.issued_at = time.time()
        self._code, self._instruction = _users_line()

    def is_over(self, state: str) -> None:
        """Set the final state of the call, and drop the references to its tensors."""
        self.state = state
        self.reads = self.writes = ()

    def release(self) -> None:
        """Drop the references to the tensors. If the call still runs on a device, the device's stream keeps their memory."""
        self.reads = self.writes = ()

    def digest(self) -> int:
        """Return a checksum of 32 bits of the signature and the mark."""
        digest = self.signature.digest()
        return digest if self.mark is None else crc32(self.mark.encode(), digest)

    @property
    def words(self) -> str:
        """The signature and the mark as text: "all_reduce(float32[10, 3], op=SUM)"."""
        words = str(self.signature)
        if self.mark is None:
            return words
        # Insert the mark before the closing bracket. If there is something in the brackets, a comma comes before the mark.
        return f"{words[:-1]}{'' if words.endswith('()') else ', '}{self.mark})"

    def __str__(self) -> str:
        """Return the call as text: "all_reduce(float32[10, 3], op=SUM), number 7"."""
        return self.words if self.number is None else f"{self.words}, number {self.number}"

    def record(self) -> CallRecord:
        """Return a `CallRecord` of this call."""
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
        """The program line that issued the call, such as "train.py:88". "?" if the stack has only library code."""
        code = self._code
        # No frame of the stack belongs to the user's program, for example in a thread that a library started.
        if code is None:
            return "?"
        # Nobody reads the line of most calls, so the line number is computed here and not when the call is made.
        spans = code.co_lines()
        line = next((line for start, stop, line in spans if start <= self._instruction < stop and line is not None), None)
        return f"{Path(code.co_filename).name}:{code.co_firstlineno if line is None else line}"  # paths differ between hosts


def _users_line() -> tuple[CodeType | None, int]:
    """Return the innermost running function of the user's program, and the index of its current instruction."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None, 0


@dataclass(frozen=True)
class CallRecord:
    """A record of one call of one rank, for reports and for other ranks. The attributes are those of `Call`."""

    number: int | None
    position: int | None
    name: str
    words: str
    digest: int
    state: str
    issued_at: float
    where: str

    def __str__(self) -> str:
        """Return the record as text: "all_reduce(float32[10, 3], op=SUM) #7 at train.py:88"."""
        place = "" if self.position is None else f" #{self.position}"
        return f"{self.words}{place} at {self.where}"

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as a dictionary that can be written as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CallRecord:
        """Make a record from a result of `as_dict`.

        Raises:
            KeyError, TypeError: `content` is not a result of `as_dict`.
        """
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})
