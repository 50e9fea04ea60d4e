"""A plan: how the ranks of a group with shared memory do one kind of collective."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

from ....contract.collective import Collective
from ....contract.deadline import Deadline
from ....contract.layout import flat, mark_written
from ....contract.running_call import RunningCall
from ....host.transport import CallKind, Plan
from ..call_verifier import NO_KEY
from ..transport import PRESYNC_MIN_BYTES
from .algorithm import Algorithm, Operation, Size
from .group_sync import GroupSync

logger = logging.getLogger("syncline.collectives")

#: What MPI does after the presync: of this rank's tensor and the whole, both flat.
ByMpi = Callable[[torch.Tensor, torch.Tensor, RunningCall], None]


class PlanRequest(NamedTuple):
    """What a plan is made for.

    Attributes:
        kind: of the calls to come.
        operation: the collective.
        size: of each call.
        call: stands for every call in messages; None: each stands for itself.
        sync: of the group.
    """

    kind: CallKind
    operation: Operation
    size: Size
    call: Collective | None
    sync: GroupSync


class NodePlan(Plan):
    """A plan of ranks that may share a node. It keeps no tensor alive, and communicates only when it is run.

    Args:
        request: what the plan is made for.
        otherwise: runs instead where the memory that this plan needs cannot be had.

    Attributes:
        chosen: the algorithm that the latest run took.
    """

    chosen: Algorithm

    def __init__(self, request: PlanRequest, otherwise: NodePlan | None = None) -> None:
        self._kind, self._operation, self._size, self._fixed_call, self._sync = request
        self._otherwise = otherwise
        self._digest = self._kind.digest() if request.call is None else request.call.digest()

    @property
    def algorithm(self) -> str:
        """The algorithm that the latest run took, in words."""
        return self.chosen.value

    @abstractmethod
    def run(self, tensor: torch.Tensor, whole: torch.Tensor, deadline: Deadline, *, is_verified: bool = False) -> None:
        """As `Plan.run`; `is_verified`: the ranks have just verified that all make this call."""

    def _run_otherwise(self, tensor: torch.Tensor, whole: torch.Tensor, deadline: Deadline, *, is_verified: bool) -> None:
        assert self._otherwise is not None
        fallback = self._otherwise.chosen
        if self.chosen is not fallback:
            logger.debug("no shared memory for %s (%s): %s from now on", self._kind.name, self.chosen.value, fallback.value)
            self.chosen = fallback
        self._otherwise.run(tensor, whole, deadline, is_verified=is_verified)

    def _written(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return tensor if self._operation is Operation.REDUCE_SCATTER else whole

    def _call(self, tensor: torch.Tensor | None) -> Collective:
        return self._fixed_call or self._kind.call(tensor)

    def _verify(self, tensor: torch.Tensor, deadline: Deadline, key: int = NO_KEY) -> bool:
        return self._sync.verify(self._call, tensor, deadline, self._digest, key)

    def _wait(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        self._sync.wait(self._call, tensor, deadline)


class MpiPlan(NodePlan):
    """MPI's own collective, with the presync in shared memory where there is any.

    Args:
        request: as for `NodePlan`.
        by_mpi: does it.
        verifies_all: not only large calls.
    """

    chosen = Algorithm.MPI

    def __init__(self, request: PlanRequest, by_mpi: ByMpi, *, verifies_all: bool = False) -> None:
        super().__init__(request)
        self._by_mpi = by_mpi
        self._has_presync = verifies_all or request.size.whole >= PRESYNC_MIN_BYTES

    def run(self, tensor: torch.Tensor, whole: torch.Tensor, deadline: Deadline, *, is_verified: bool = False) -> None:
        """Verify the call if it is large, or all are verified, and let MPI do it."""
        if self._has_presync and not is_verified:
            self._verify(tensor, deadline)
        self._by_mpi(flat(tensor), flat(whole), RunningCall(self._call(tensor), deadline))
        mark_written(self._written(tensor, whole))
