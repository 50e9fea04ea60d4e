"""CallRecord: what is known of one call after it was issued, without its tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

QUEUED, RUNNING, DONE, FAILED = "queued", "running", "done", "failed"


@dataclass(frozen=True)
class CallRecord:
    """One call of a collective on one rank.

    Attributes:
        number: of its issue on this rank, from 0; None if not all ranks of the group issue such calls.
        position: in the group's total order, from 0; None if it has not begun, or has no place there.
        name: the method's name, such as "all_reduce".
        dtype: of the tensor that stands for the call, such as "float32"; empty if it has none.
        shape: of that tensor.
        op: the reduction's name; empty if there is none.
        root: the root, if there is one.
        detail: what else there is to agree on.
        state: "queued", "running", "done" or "failed".
        issued_at: when it was issued, in seconds since the epoch, by this rank's clock.
        where: file and line of the program that issued it, such as "train.py:88".
    """

    number: int | None
    position: int | None
    name: str
    dtype: str
    shape: tuple[int, ...]
    op: str
    root: int | None
    detail: str
    state: str
    issued_at: float
    where: str

    @property
    def key(self) -> tuple[object, ...]:
        """What must be the same on all ranks; see `Collective.digest`."""
        return self.name, self.dtype, math.prod(self.shape), self.op, self.root, self.detail

    def __str__(self) -> str:
        """In words: "all_reduce(float32[10, 3], op=SUM) #7 at train.py:88"."""
        words = (
            f"{self.dtype}{list(self.shape)}" if self.dtype else "",
            f"op={self.op}" if self.op else "",
            "" if self.root is None else f"root={self.root}",
            self.detail,
        )
        place = "" if self.position is None else f" #{self.position}"
        return f"{self.name}({', '.join(filter(None, words))}){place} at {self.where}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CallRecord:
        """What `as_dict` gave, after JSON.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        fields = {name: content[name] for name in cls.__dataclass_fields__}
        return cls(**{**fields, "shape": tuple(int(extent) for extent in fields["shape"])})
