"""Transport: the blocking collectives that a host backend is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..contract.collective import Collective, digest
from ..contract.deadline import Deadline
from ..contract.reduce_op import Reduction
from ..contract.running_call import RunningCall
from ..failures.liveness import Liveness
from ..failures.stall_watch import StatusPost

if TYPE_CHECKING:
    import torch.distributed as dist


class Request(ABC):
    """A send or receive that was started."""

    @abstractmethod
    def wait(self, deadline: Deadline) -> None:
        """Block until it is over. Called by one thread at a time.

        Raises:
            TimeoutError: the deadline passed; it can be waited for again.
        """

    @abstractmethod
    def test(self) -> bool:
        """Whether it is over, without blocking. May be false for ever where the library cannot tell before `wait`."""

    @abstractmethod
    def source(self) -> int | None:
        """For a receive that is over: the rank that sent."""


class CallKind(NamedTuple):
    """What is the same in all calls that one plan serves.

    Attributes:
        name: the method's name, such as "all_reduce".
        op: the reduction, if there is one.
        root: the root, if there is one.
        dtype: of the tensors.
        numel: of this rank's tensor: the part for each rank, where another tensor is a block of all parts.
    """

    name: str
    op: Reduction | None
    root: int | None
    dtype: torch.dtype
    numel: int

    def call(self, tensor: torch.Tensor | None) -> Collective:
        """A call of that kind."""
        return Collective(self.name, tensor, self.op, self.root)

    def digest(self) -> int:
        """That of each call of the kind."""
        return digest(self.name, self.dtype, self.op, self.root, "", self.numel)


class Plan(ABC):
    """How a transport does one kind of collective: what can be decided before the call was decided when the plan was made.

    The ranks need not all have kept their plans: a plan that was made for a single call does the same.
    """

    @property
    @abstractmethod
    def algorithm(self) -> str:
        """The algorithm that the latest run took, in a word or two."""

    @abstractmethod
    def run(self, tensor: torch.Tensor, whole: torch.Tensor, deadline: Deadline) -> None:
        """Do it, as the transport's method does, and let autograd know what was written.

        Args:
            tensor: this rank's tensor, contiguous, on the CPU, of any shape.
            whole: the block, where the collective has one; else `tensor` itself.
            deadline: of the call.
        """


class Transport(ABC):
    """Blocking collectives on CPU tensors: all that a backend needs to write; `HostGroup` makes a process group of it.

    `HostGroup` calls one collective at a time, in the group's total order, on its progress thread or on the caller's. Each
    method blocks until this rank's part is done. Tensors are flat, contiguous, on the CPU, of any dtype, and checked; a "block"
    holds `size` equal parts, one for each rank. `call` says which collective runs, and until when: a method must give up when
    the deadline has passed, by raising `TimeoutError` with what it knows of the other ranks. Errors of the library underneath
    are raised as `TransportError`, `from` the original.
    """

    #: The registry's name of the backend, such as "mpi".
    backend_name: str

    #: Says which of the ranks are lost; None where the transport does not know whose processes they are.
    liveness: Liveness | None = None

    @property
    def verifies_every_call(self) -> bool:
        """Whether the ranks compare each collective before it runs; the same on all ranks. If not, the group compares later."""
        return False

    @abstractmethod
    def describe(self) -> str:
        """The library underneath and its version, in a few words."""

    def allocate(self, numel: int, dtype: torch.dtype, call: RunningCall) -> torch.Tensor:  # noqa: ARG002
        """Memory from which the transport communicates fastest, flat; what it holds is undefined. By default plain memory."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: Reduction, call: RunningCall) -> None:
        """Combine in place; all ranks end with the same bits."""

    def plan(self, kind: CallKind) -> Plan | None:  # noqa: ARG002
        """How calls of a kind are done from now on; None if the methods here have nothing to decide beforehand.

        Asked for `all_reduce`, `broadcast`, and the forms of `all_gather` and `reduce_scatter`, on CPU tensors. Does not
        communicate. The plan is good for as long as the transport is open, whether or not other ranks use one.
        """
        return None

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction, call: RunningCall) -> None:
        """Combine in place on the root; elsewhere the tensor is not changed."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int, call: RunningCall) -> None:
        """Copy the root's tensor to all, in place."""

    @abstractmethod
    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor, call: RunningCall) -> None:
        """Copy rank r's tensor into part r of the block, on every rank. `tensor` may be this rank's part of the block."""

    @abstractmethod
    def gather(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: RunningCall) -> None:
        """Copy rank r's tensor into part r of the root's block."""

    @abstractmethod
    def scatter(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: RunningCall) -> None:
        """Copy part r of the root's block into rank r's tensor."""

    @abstractmethod
    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction, call: RunningCall) -> None:
        """Combine the blocks and leave part r in rank r's tensor. The block is not changed, unless `tensor` is part of it."""

    @abstractmethod
    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        call: RunningCall,
    ) -> None:
        """Send `input_counts[r]` elements to rank r, receive `output_counts[r]` from it; parts lie one after the other."""

    @abstractmethod
    def barrier(self, call: RunningCall) -> None:
        """Return once all ranks have entered."""

    @abstractmethod
    def start_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Request:
        """Begin to send; must not wait for the receiver. Called from any thread, also while a collective runs."""

    @abstractmethod
    def start_recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Request:
        """Begin to receive, from any rank if `src` is None. Called from any thread, also while a collective runs."""

    @abstractmethod
    def subset(self, members: Sequence[int], name: str, number: int, deadline: Deadline) -> Transport:
        """A transport between some of the ranks, in the order given. Only the members call it, all of them.

        `name` and `number` (0 or above) are the same for all members. At any time there is only one subset of that name.
        """

    def meeting_store(self) -> dist.Store | None:
        """As `ProcessGroup.meeting_store`."""
        return None

    def status_post(self) -> StatusPost | None:
        """Where the ranks leave lines for rank 0, without disturbing what they do; None if there is no such place."""
        return None

    def give_up(self) -> None:  # noqa: B027 - most have no way to say it
        """A collective has failed here, and there will be no other: tell the ranks that wait, if possible. Must not block."""

    def leave_to_parent(self) -> None:  # noqa: B027 - most objects can be dropped
        """In a fork, which must neither use nor free what the library keeps for the parent; see Note [Forks] in `forks`."""

    def lost_ranks(self) -> Sequence[int]:
        """The ranks of which the library says that they have failed. Must not block."""
        return ()

    def interrupt(self) -> None:  # noqa: B027 - most libraries return by themselves
        """Have the library end the collective that runs on another thread, with an error; nothing comes after it. May block."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Nothing is in flight."""

    @abstractmethod
    def abort(self) -> None:
        """Make the other ranks' and other threads' waits end as soon as possible. Must not block."""
