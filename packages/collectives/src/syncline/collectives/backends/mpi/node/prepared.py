"""Ways of `all_reduce` for tensors of one size, again and again: what does not change is looked up once.

A small tensor is exchanged in a few microseconds, half of which went into Python's way to the same few places; after a large
one that way is longer still, because it is no longer in the cache. The ranks need not all be prepared: to the others it is the
same.
"""

from __future__ import annotations

from ctypes import memmove
from typing import TYPE_CHECKING

import torch

from ....collective import Collective
from ....deadline import Deadline
from ....layout import flat
from ....reduce_op import Reduction
from ....reduction import always_of
from ....transport import AllReduce, PreparedAllReduce
from .board import NOWHERE, Board
from .in_window import InWindow
from .peer_memory import PeerMemory, readable_address
from .slice_reduction import SlicedAllReduce

if TYPE_CHECKING:
    from .group_meeting import GroupMeeting
    from .memory import NodeMemory


class Prepared:
    """What they share: meeting on the board for this call.

    Args:
        board: of all ranks of the group.
        meeting: of the group.
        op: the reduction.
        call: one like those to come.
    """

    def __init__(self, board: Board, meeting: GroupMeeting, op: Reduction, call: Collective) -> None:
        self._board = board
        self._meeting = meeting
        self._op = op
        self._digest = call.digest()

    def _meet(self, tensor: torch.Tensor, deadline: Deadline, key: int = NOWHERE) -> bool:
        """As `GroupMeeting.meet`."""
        is_same, is_common = self._arrive(tensor, deadline, self._digest, key)
        if not is_same:
            raise self._meeting.different_calls(self._call(tensor), deadline)
        return is_common

    def _arrive(self, tensor: torch.Tensor, deadline: Deadline, digest: int = 0, key: int = NOWHERE) -> tuple[bool, bool]:
        """As `GroupMeeting.barrier`, and as `Board.arrive`."""
        try:
            return self._board.arrive(deadline, digest, key)
        except Exception as error:  # noqa: BLE001 - the meeting knows them all
            self._meeting.explain(error, self._call(tensor), deadline)

    def _call(self, tensor: torch.Tensor) -> Collective:
        return Collective("all_reduce", tensor, self._op)


class PreparedExchange(Prepared):
    """Does what `Exchange` does, in one piece.

    Args:
        board: with room for the tensor in a slot.
        meeting: of the group.
        tensor: like those to come, with an element at least; not kept.
        op: the reduction.
        call: one like those to come.
    """

    def __init__(self, board: Board, meeting: GroupMeeting, tensor: torch.Tensor, op: Reduction, call: Collective) -> None:
        super().__init__(board, meeting, op, call)
        self._nbytes = tensor.nbytes
        slots = [board.slots_at(turn, tensor.numel(), tensor.dtype) for turn in (0, 1)]
        self._turns = [(shown[board.mine].data_ptr(), always_of(shown, op, tensor.dtype)) for shown in slots]

    def __call__(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Combine in place."""
        mine, reduce = self._turns[(self._board.arrivals + 1) & 1]
        memmove(mine, tensor.data_ptr(), self._nbytes)
        self._meet(tensor, deadline)
        reduce(out=flat(tensor))


class PreparedSingleCopy(Prepared):
    """Does what `SingleCopy` does.

    Args:
        board: of all ranks of the group.
        meeting: of the group.
        peers: the memory of all ranks.
        tensor: like those to come; not kept.
        op: the reduction.
        call: one like those to come.
        otherwise: what to do where a rank says that its memory cannot be read.
    """

    def __init__(
        self,
        board: Board,
        meeting: GroupMeeting,
        peers: PeerMemory,
        tensor: torch.Tensor,
        op: Reduction,
        call: Collective,
        otherwise: AllReduce,
    ) -> None:
        super().__init__(board, meeting, op, call)
        self._reduction = SlicedAllReduce(peers, board.mine, tensor.numel(), tensor.dtype, op)
        self._otherwise = otherwise

    def __call__(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Combine in place."""
        self._meet(tensor, deadline, readable_address(tensor))
        addresses = self._board.keys()
        if NOWHERE in addresses:
            self._otherwise(flat(tensor), self._op, self._call(tensor), deadline)
        else:
            self._reduction.run(flat(tensor), addresses, lambda: self._arrive(tensor, deadline))


class PreparedUnlessInWindow(Prepared):
    """Looks, as soon as the group has windows, whether all ranks have the tensor in one; it is reduced there then.

    Args:
        board: of all ranks of the group.
        meeting: of the group.
        memory: where the windows are.
        op: the reduction.
        call: one like those to come.
        elsewhere: what to do with tensors that are in none.
    """

    def __init__(
        self,
        board: Board,
        meeting: GroupMeeting,
        memory: NodeMemory,
        op: Reduction,
        call: Collective,
        elsewhere: PreparedAllReduce,
    ) -> None:
        super().__init__(board, meeting, op, call)
        self._memory = memory
        self._elsewhere = elsewhere

    def __call__(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Combine in place."""
        if self._memory.has_windows:
            place = self._memory.find(tensor)
            is_common = self._meet(tensor, deadline, NOWHERE if place is None else place.key)
            if place is not None and is_common:
                InWindow(place, lambda: self._arrive(tensor, deadline)).all_reduce(flat(tensor), self._op)
                return
        self._elsewhere(tensor, deadline)
