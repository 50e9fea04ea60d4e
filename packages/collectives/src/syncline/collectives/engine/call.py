"""One call of a collective: its signature, its state, and a record of the call for reports and for other ranks."""

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
    """What one call of a collective does, without its tensors. Hashable: a group looks up its plans by signature.

    The class is a tuple, because every call makes a signature, and making a frozen dataclass takes four times as long.

    Attributes:
        name: the method's name, such as "all_reduce".
        op: the reduction; None if there is none.
        root: the root's rank in the group; None if there is none.
        dtype: the dtype of the call's main tensor (the argument `tensor` or `output`); None without a tensor.
        shape: the shape of the main tensor.
        device_type: the type of device on which the call's tensors are, such as "cpu".
        detail: other facts that must be equal on all ranks, such as "dtype=torch.int8"; empty if there are no such facts.
        splits: for an all-to-all, how many elements this rank receives from each rank, and how many it sends to each rank.
            Splits may differ between ranks.
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
        """Return the signature of a call whose main tensor is `tensor`."""
        return cls(name, op, root, tensor.dtype, tensor.shape, device_type_of(tensor), detail)

    # Read `reduction` only if the collective has a reduction, `root_rank` only if it has a root, `element_dtype` only if it has
    # a tensor.

    @property
    def reduction(self) -> Reduction:
        """The reduction; never None."""
        assert self.op is not None
        return self.op

    @property
    def root_rank(self) -> int:
        """The root's rank in the group; never None."""
        assert self.root is not None
        return self.root

    @property
    def element_dtype(self) -> torch.dtype:
        """The dtype of the main tensor; never None."""
        assert self.dtype is not None
        return self.dtype

    @property
    def numel(self) -> int:
        """The number of elements of the main tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the main tensor; 0 if there is none."""
        return 0 if self.dtype is None else self.numel * self.dtype.itemsize

    def digest(self) -> int:
        """Return a checksum of 32 bits. If two ranks have different checksums for one call, the ranks make different calls.

        The checksum covers the method, the reduction, the root, the detail, and the main tensor's dtype and number of elements.
        The checksum leaves out the shape, because the shape may differ between ranks, as in torch.distributed. Shapes are
        compared only if the group has the option `check_calls`.
        """
        return _digest(self)

    def __str__(self) -> str:
        """Return the signature in words: "all_reduce(float32[10, 3], op=SUM)"."""
        words = (
            "" if self.dtype is None else f"{dtype_in_words(self.dtype)}{list(self.shape)}",
            "" if self.op is None else f"op={self.op.name}",
            "" if self.root is None else f"root={self.root}",
            self.detail,
        )
        return f"{self.name}({', '.join(filter(None, words))})"


def device_type_of(tensor: torch.Tensor) -> str:
    """Return the type of device on which the tensor is, such as "cpu"."""
    return "cpu" if tensor.is_cpu else tensor.device.type  # `is_cpu` costs a third of `device.type`


@functools.lru_cache(maxsize=4096)
def _digest(signature: Signature) -> int:
    name, op, root, dtype, detail = signature.name, signature.op, signature.root, signature.dtype, signature.detail
    numel = None if dtype is None else signature.numel
    return crc32(repr((name, dtype, op, root, detail, numel)).encode())


def dtype_in_words(dtype: torch.dtype) -> str:
    """Return a dtype without torch's prefix: "float32"."""
    return str(dtype).removeprefix("torch.")


def tensor_in_words(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype and shape: "float32[10, 3]"."""
    return f"{dtype_in_words(tensor.dtype)}{list(tensor.shape)}"


QUEUED, RUNNING, DONE, FAILED = "queued", "running", "done", "failed"

# Frames of these modules are not the user's program: `Call.where` skips them.
_LIBRARIES = ("syncline.", "torch.")


class Call:
    """One call of a collective that this rank has issued.

    The group makes the call. The group's thread or the caller's thread runs the call. The monitor (`health.monitor`) can end
    the call's waits through `scope`. The recorder (`health.recorder`) keeps the call after its end. So that the recorder keeps
    no memory alive, the call releases its tensors when it ends.

    Args:
        signature: says which collective is called, with which reduction, root, dtype and shape.
        number: the call's number on this rank, counted from 0 over the calls that all ranks of the group issue. None if not all
            ranks issue this call.
        reads: tensors that the call only reads.
        writes: tensors that the call writes, or reads and writes.
        mark: a text for errors and for the comparison of calls; see `ProcessGroup.marked`. The mark is not in the signature,
            because calls with and without a mark use the same plan.

    Attributes:
        position: the call's index, from 0, in the order in which the group runs the calls that have a number. None before the
            call begins, or if the call has no number.
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
        """Set the state in which the call ended, and release its tensors."""
        self.state = state
        self.reads = self.writes = ()

    def release(self) -> None:
        """Release the tensors.

        If the call still runs on a device, the device's stream keeps the memory of the tensors until the call is over.
        """
        self.reads = self.writes = ()

    def digest(self) -> int:
        """Return the signature's checksum of 32 bits. If the call has a mark, the checksum covers the mark, too."""
        digest = self.signature.digest()
        return digest if self.mark is None else crc32(self.mark.encode(), digest)

    @property
    def words(self) -> str:
        """The signature in words, with the mark at the end if there is one: "all_reduce(float32[10, 3], op=SUM)"."""
        words = str(self.signature)
        if self.mark is None:
            return words
        # Insert the mark before the closing bracket. If there is something in the brackets, a comma comes before the mark.
        return f"{words[:-1]}{'' if words.endswith('()') else ', '}{self.mark})"

    def __str__(self) -> str:
        """Return the call in words: "all_reduce(float32[10, 3], op=SUM), number 7"."""
        return self.words if self.number is None else f"{self.words}, number {self.number}"

    def record(self) -> CallRecord:
        """Return the record of this call for reports and other ranks."""
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
        """The line of the user's program that issued the call, such as "train.py:88". "?" if all frames belong to libraries."""
        code = self._code
        # No frame of the stack belongs to the user's program, for example in a thread that a library started.
        if code is None:
            return "?"
        # Nobody reads the line of most calls, so the line number is computed here and not when the call is made.
        spans = code.co_lines()
        line = next((line for start, stop, line in spans if start <= self._instruction < stop and line is not None), None)
        return f"{Path(code.co_filename).name}:{code.co_firstlineno if line is None else line}"  # paths differ between hosts


def _users_line() -> tuple[CodeType | None, int]:
    """Return the innermost function of the user's program, and its current instruction."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None, 0


@dataclass(frozen=True)
class CallRecord:
    """One call of one rank, as reports and other ranks see it.

    Attributes:
        number: as `Call.number`.
        position: as `Call.position`.
        name: the method's name, such as "all_reduce".
        words: as `Call.words`.
        digest: as `Call.digest`.
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
        """Return the record in words: "all_reduce(float32[10, 3], op=SUM) #7 at train.py:88"."""
        place = "" if self.position is None else f" #{self.position}"
        return f"{self.words}{place} at {self.where}"

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as values that `json.dumps` takes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CallRecord:
        """Return the record from which `as_dict` made `content`. `content` may have gone through JSON.

        Raises:
            KeyError, TypeError: `as_dict` did not make `content`.
        """
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})
