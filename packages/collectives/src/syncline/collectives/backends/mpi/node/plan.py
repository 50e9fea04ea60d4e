"""A plan: how the ranks of a group with shared memory do one kind of collective."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch

from ....contract.collective import Collective
from ....contract.deadline import Deadline
from ....contract.layout import flat, mark_written
from ....host.transport import CallKind, Plan
from ..call_verifier import NO_KEY
from .algorithm import Algorithm
from .group_sync import GroupSync

#: What MPI does after the presync: of this rank's tensor and the whole, both flat.
ByMpi = Callable[[torch.Tensor, torch.Tensor, Collective, Deadline], None]


class NodePlan(Plan):
    """A plan of ranks that may share a node. It keeps no tensor alive, and communicates only when it is run.

    Args:
        kind: of the calls to come.
        call: stands for every call in messages; None: each stands for itself.
        sync: of the group.
    """

    chosen: Algorithm

    def __init__(self, kind: CallKind, call: Collective | None, sync: GroupSync) -> None:
        self._kind = kind
        self._fixed_call = call
        self._sync = sync
        self._digest = kind.digest() if call is None else call.digest()

    @property
    def algorithm(self) -> str:
        """The algorithm that the latest run took."""
        return self.chosen.value

    @abstractmethod
    def run_verified(self, tensor: torch.Tensor, whole: torch.Tensor, deadline: Deadline) -> None:
        """As `run`, when the ranks have verified that all make this call."""

    def _call(self, tensor: torch.Tensor) -> Collective:
        return self._fixed_call or self._kind.call(tensor)

    def _verify(self, tensor: torch.Tensor, deadline: Deadline, key: int = NO_KEY) -> bool:
        return self._sync.verify(lambda: self._call(tensor), deadline, self._digest, key)

    def _wait(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        self._sync.wait(lambda: self._call(tensor), deadline)


class MpiPlan(NodePlan):
    """MPI's own collective, with the presync in shared memory where there is any.

    Args:
        kind: as for `NodePlan`.
        call: as for `NodePlan`.
        sync: as for `NodePlan`.
        by_mpi: does it.
        has_presync: whether the calls are large enough; see Note [Presync].
    """

    chosen = Algorithm.MPI

    def __init__(self, kind: CallKind, call: Collective | None, sync: GroupSync, by_mpi: ByMpi, *, has_presync: bool) -> None:
        super().__init__(kind, call, sync)
        self._by_mpi = by_mpi
        self._has_presync = has_presync

    def run(self, tensor: torch.Tensor, whole: torch.Tensor, deadline: Deadline) -> None:
        """Verify the call if it is large, and let MPI do it."""
        if self._has_presync:
            self._verify(tensor, deadline)
        self.run_verified(tensor, whole, deadline)

    def run_verified(self, tensor: torch.Tensor, whole: torch.Tensor, deadline: Deadline) -> None:
        """Let MPI do it."""
        self._by_mpi(flat(tensor), flat(whole), self._call(tensor), deadline)
        mark_written(tensor)
        if whole is not tensor:
            mark_written(whole)
