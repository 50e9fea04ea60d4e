"""MPI's own `all_reduce`, for tensors of one size, again and again."""

from __future__ import annotations

import torch
from mpi4py import MPI

from ....collective import Collective
from ....deadline import Deadline
from ....reduce_op import ReduceOp
from ..library import mapped
from ..transport import BLOCKS_WELL
from .board import Board
from .by_address import ByAddress
from .group_meeting import GroupMeeting
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
        numel, nbytes = tensor.numel(), tensor.nbytes
        datatype, self._native_op = native
        self._specs = ByAddress(lambda address: (MPI.buffer.fromaddress(address, nbytes), numel, datatype))
        self._divisor = communicator.Get_size() if op is ReduceOp.AVG else 1

    def after_meeting(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Let MPI do it."""
        arguments = MPI.IN_PLACE, self._specs[tensor.data_ptr()], self._native_op
        if BLOCKS_WELL:
            try:
                self._communicator.Allreduce(*arguments)
            except MPI.Exception as error:
                raise mapped(error) from error
        else:
            self._meeting.run(self._call(tensor), lambda: self._communicator.Iallreduce(*arguments), deadline)
        if self._divisor > 1:
            tensor.div_(self._divisor)
