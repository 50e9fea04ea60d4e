"""MPI's own `all_reduce`, for tensors of one size, again and again."""

from __future__ import annotations

import torch
from mpi4py import MPI

from ....contract.collective import Collective
from ....contract.deadline import Deadline
from ....contract.layout import mark_written
from ....contract.reduce_op import ReduceOp
from ....host.reduction import divide
from ..library import mapped
from ..transport import BLOCKS_WELL
from .board import Board
from .group_meeting import GroupMeeting
from .kept import Kept
from .prepared import Prepared


class PreparedMPI(Prepared):
    """Does what `MPITransport` does (see Note [Meeting first]), for tensors that the ranks meet for.

    Args:
        board: of all ranks of the group.
        meeting: of the group.
        communicator: of the group.
        tensor: like those to come; not kept.
        op: the reduction, one without a factor.
        native: what MPI calls dtype and reduction.
        call: one like those to come.
    """

    def __init__(
        self,
        board: Board,
        meeting: GroupMeeting,
        communicator: MPI.Intracomm,
        tensor: torch.Tensor,
        op: ReduceOp,
        native: tuple[MPI.Datatype, MPI.Op],
        call: Collective,
    ) -> None:
        super().__init__(board, meeting, op, call)
        self._communicator = communicator
        self._numel, self._nbytes = tensor.numel(), tensor.nbytes
        self._datatype, self._native_op = native
        self._specs: Kept[tuple[MPI.buffer, int, MPI.Datatype]] = Kept()
        self._divisor = communicator.Get_size() if op is ReduceOp.AVG else 1

    def after_meeting(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Let MPI do it."""
        address = tensor.data_ptr()
        spec = self._specs.get(address)
        if spec is None:
            spec = MPI.buffer.fromaddress(address, self._nbytes), self._numel, self._datatype
            self._specs.keep(address, spec)
        arguments = MPI.IN_PLACE, spec, self._native_op
        if BLOCKS_WELL:
            try:
                self._communicator.Allreduce(*arguments)
            except MPI.Exception as error:
                raise mapped(error) from error
        else:
            self._meeting.run(self._call(tensor), lambda: self._communicator.Iallreduce(*arguments), deadline)
        if self._divisor > 1:
            divide(tensor, self._divisor)
        mark_written(tensor)
