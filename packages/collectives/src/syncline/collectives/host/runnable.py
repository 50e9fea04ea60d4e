"""What a group runs in its turn: a call with the function that does it, or a kept plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from ..contract.collective import Collective
from ..contract.deadline import Deadline
from ..contract.layout import is_tracked, untracked
from ..contract.reduce_op import Reduction
from ..contract.running_call import RunningCall
from ..failures.flight_recorder import What
from .device_runtime import Body
from .transport import CallKind, Plan


class Runnable(Protocol):
    """What `SerialGroup` needs of either, with or without the tensor that a kept plan is run on."""

    @property
    def digest(self) -> int:
        """That of the call."""

    @property
    def run(self) -> Callable[[Any, Any, Deadline], None]:
        """As `Plan.run`."""

    def collective(self, tensor: Any) -> Collective:
        """The call, for messages."""


class IssuedCall:
    """A call, and the function that does it. It knows its tensors, and is run on None.

    Args:
        call: which one.
        body: does it.
        tensors: all that the body touches.
    """

    __slots__ = ("_body", "_call", "_tensors")

    def __init__(self, call: Collective, body: Body, tensors: Sequence[torch.Tensor]) -> None:
        self._call = call
        self._body = body
        self._tensors = tensors

    @property
    def digest(self) -> int:
        """That of the call."""
        return self._call.digest()

    def collective(self, _: None) -> Collective:
        """The call."""
        return self._call

    def run(self, _: None, __: None, deadline: Deadline) -> None:
        """Do it, out of autograd's sight if a tensor needs that."""
        running = RunningCall(self._call, deadline)
        if is_tracked(self._tensors):
            with untracked():
                self._body(running)
        else:
            self._body(running)


#: By what kept plans are found: name, op, root, dtype and shape of this rank's tensor.
PlanKey: TypeAlias = tuple[str, Reduction | None, int | None, torch.dtype, torch.Size]

_WITHOUT_BLOCK = frozenset({"all_reduce", "broadcast"})


class KeptPlan:
    """A plan, and what is the same in all calls that it serves.

    Args:
        plan: of the transport.
        kind: of the calls.

    Attributes:
        plan: the same.
        run: as the plan's.
        digest: of each call.
        what: for the record.
        is_complex: whether the tensors are.
        has_block: whether a call has a block of the parts of all ranks, beside this rank's.
    """

    __slots__ = ("_kind", "digest", "has_block", "is_complex", "plan", "run", "what")

    def __init__(self, plan: Plan, kind: CallKind) -> None:
        self._kind = kind
        self.plan = plan
        self.run = plan.run
        self.digest = kind.digest()
        self.is_complex = kind.dtype.is_complex
        self.has_block = kind.name not in _WITHOUT_BLOCK
        self.what: What = (kind.name, kind.dtype, kind.op, kind.root, "")

    def collective(self, tensor: torch.Tensor) -> Collective:
        """A call on that tensor."""
        return self._kind.call(tensor)
