"""Ranks as threads of one process: the reference that the other backends are held against, and the test bed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..backend import Backend, ConnectRequest
from ..deadline import Deadline
from ..errors import DisagreementError, InvalidArgumentError, LaunchError, TransportError
from ..host_group import HostGroup
from ..process_group import Collective
from ..reduce_op import ReduceOp
from ..reduction import reduce_in_rank_order
from ..transport import Transport


class MeetingPoint:
    """Where the threads of a group hand one another what they have: the n-th call of each rank meets the n-th of the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._condition = threading.Condition()
        self._rounds: dict[int, dict[int, Any]] = {}
        self._departed: dict[int, int] = {}
        self._aborted = False

    def exchange(self, round_number: int, rank: int, value: Any, deadline: Deadline) -> list[Any]:
        """Leave a value and return the values of all ranks of the same round, by rank.

        Raises:
            TimeoutError: not all came in time; the message names those that did not.
            TransportError: the group was aborted.
        """
        with self._condition:
            arrived = self._rounds.setdefault(round_number, {})
            arrived[rank] = value
            self._condition.notify_all()
            self._condition.wait_for(lambda: len(arrived) == self.size or self._aborted, deadline.remaining_s())
            if len(arrived) < self.size:
                missing = ", ".join(str(r) for r in range(self.size) if r not in arrived)
                if self._aborted:
                    raise TransportError(f"the group was aborted while rank(s) {missing} had not called")
                raise TimeoutError(f"rank(s) {missing} have not called")
            self._depart(round_number)
            return [arrived[r] for r in range(self.size)]

    def abort(self) -> None:
        """Wake everybody who waits."""
        with self._condition:
            self._aborted = True
            self._condition.notify_all()

    def _depart(self, round_number: int) -> None:
        self._departed[round_number] = self._departed.get(round_number, 0) + 1
        if self._departed[round_number] == self.size:
            del self._rounds[round_number], self._departed[round_number]


class InProcessTransport(Transport):
    """Each collective is two meetings: show the others my tensor; then, when all have read, write."""

    backend_name = "in_process"

    def __init__(self, meeting_point: MeetingPoint, rank: int) -> None:
        self._meeting_point = meeting_point
        self._rank = rank
        self._round = 0

    def describe(self) -> str:
        """Its name and the number of threads."""
        return f"in_process: {self._meeting_point.size} rank(s) as threads"

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, call: Collective, deadline: Deadline) -> None:
        """Every rank reduces all tensors itself, in rank order."""
        result = reduce_in_rank_order(op, self._show(tensor, call, deadline))
        self.barrier(call, deadline)
        tensor.copy_(result)

    def broadcast(self, tensor: torch.Tensor, root: int, call: Collective, deadline: Deadline) -> None:
        """Every rank copies the root's tensor."""
        tensors = self._show(tensor, call, deadline)
        if self._rank != root:
            tensor.copy_(tensors[root])
        self.barrier(call, deadline)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, call: Collective, deadline: Deadline) -> None:
        """Every rank copies every tensor."""
        results = [shown.clone() for shown in self._show(tensor, call, deadline)]
        self.barrier(call, deadline)
        for output, result in zip(outputs, results, strict=True):
            output.copy_(result)

    def barrier(self, call: Collective, deadline: Deadline) -> None:
        """Meet."""
        self._meet(call, None, deadline)

    def close(self) -> None:
        """Nothing to release."""

    def abort(self) -> None:
        """Wake the other threads."""
        self._meeting_point.abort()

    def _show(self, tensor: torch.Tensor, call: Collective, deadline: Deadline) -> list[torch.Tensor]:
        return self._meet(call, tensor, deadline)

    def _meet(self, call: Collective, value: torch.Tensor | None, deadline: Deadline) -> list[Any]:
        self._round += 1
        met = self._meeting_point.exchange(self._round, self._rank, (call.signature(), value), deadline)
        signatures = [signature for signature, _ in met]
        if len(set(signatures)) > 1:
            calls = "; ".join(f"rank {rank}: {signature}" for rank, signature in enumerate(signatures))
            raise DisagreementError(f"the ranks called different collectives ({calls}); make every rank issue the same ones")
        return [value for _, value in met]


def create_groups(size: int, *, name: str = "default", timeout_s: float = 60.0) -> list[HostGroup]:
    """One group of `size` ranks in this process; hand each to the thread that plays its rank.

    Raises:
        InvalidArgumentError: the size is below one.
    """
    if size < 1:
        raise InvalidArgumentError(f"expected at least one rank, found {size}")
    meeting_point = MeetingPoint(size)
    return [
        HostGroup(InProcessTransport(meeting_point, rank), rank, size, name=name, timeout_s=timeout_s) for rank in range(size)
    ]


class InProcessBackend(Backend):
    """The group of one: what a script gets that nothing launched."""

    def missing(self) -> str | None:
        """Nothing, ever."""
        return None

    def connect(self, request: ConnectRequest) -> HostGroup:
        """Return a group of one; more ranks are threads, which only `syncline.collectives.testing.run_ranks` starts."""
        asked = request.world_size or (request.launch.world_size if request.launch else 1)
        if asked != 1:
            raise LaunchError(
                f"backend 'in_process' connects threads of one process, but this job has {asked} processes; use backend "
                "'mpi' or 'gloo', or syncline.collectives.testing.run_ranks for ranks as threads"
            )
        return create_groups(1, name=request.group_name, timeout_s=request.timeout_s)[0]


backend = InProcessBackend()
