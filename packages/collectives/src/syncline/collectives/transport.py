"""Transport: the blocking collectives that a host backend is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from .deadline import Deadline
from .process_group import Collective
from .reduce_op import ReduceOp


class Transport(ABC):
    """Blocking collectives on CPU tensors: all that a backend needs to write; `HostGroup` makes a process group of it.

    `HostGroup` calls one method at a time, in the group's total order, on its progress thread or on the caller's. Each
    method blocks until this rank's part is done. Tensors are dense, contiguous, on the CPU and checked. A method must give
    up when the deadline has passed, by raising `TimeoutError` with what it knows of the other ranks; errors of the library
    underneath are raised as `TransportError`, `from` the original.
    """

    #: The registry's name of the backend, such as "mpi".
    backend_name: str

    @abstractmethod
    def describe(self) -> str:
        """The library underneath and its version, in a few words."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, call: Collective, deadline: Deadline) -> None:
        """Combine in place; all ranks end with the same bits."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int, call: Collective, deadline: Deadline) -> None:
        """Copy the root's tensor to all, in place."""

    @abstractmethod
    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, call: Collective, deadline: Deadline) -> None:
        """Copy rank r's tensor into `outputs[r]` on every rank."""

    @abstractmethod
    def barrier(self, call: Collective, deadline: Deadline) -> None:
        """Return once all ranks have entered."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Nothing is in flight."""

    @abstractmethod
    def abort(self) -> None:
        """Make the other ranks' and other threads' waits end as soon as possible. Must not block."""
