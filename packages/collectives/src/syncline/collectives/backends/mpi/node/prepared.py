"""Ways of `all_reduce` for tensors of one size, again and again: what does not change is looked up once.

A small tensor is exchanged in a few microseconds, half of which went into Python's way to the same few places; after a large
one that way is longer still, because it is no longer in the cache. The ranks need not all be prepared: to the others it is the
same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import memmove
from typing import TYPE_CHECKING

import torch

from ....contract.collective import Collective
from ....contract.deadline import Deadline
from ....contract.layout import flat, mark_written
from ....contract.reduce_op import Reduction
from ....host.reduction import always_of
from ....host.transport import AllReduce
from .board import NOWHERE, Board
from .kept import Kept, view_at
from .peer_memory import PeerMemory, readable_address
from .slice_reduction import SlicedAllReduce
from .window_reduction import WindowAllReduce

if TYPE_CHECKING:
    from .group_meeting import GroupMeeting
    from .memory import NodeMemory


class Prepared(ABC):
    """A `PreparedAllReduce` of ranks that meet on their board.

    Attributes:
        reads: whether the ranks say where their tensors can be read when they meet.

    Args:
        board: of all ranks of the group.
        meeting: of the group.
        op: the reduction.
        call: one like those to come.
    """

    reads = False

    def __init__(self, board: Board, meeting: GroupMeeting, op: Reduction, call: Collective) -> None:
        self._board = board
        self._meeting = meeting
        self._op = op
        self._digest = call.digest()

    def __call__(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Combine in place."""
        self._meet(tensor, deadline)
        self.after_meeting(tensor, deadline)

    @abstractmethod
    def after_meeting(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Combine in place; the ranks have met for this call, and have said where their tensors can be read."""

    def _meet(self, tensor: torch.Tensor, deadline: Deadline, key: int = NOWHERE) -> bool:
        """As `GroupMeeting.meet`."""
        address = readable_address(tensor) if self.reads else NOWHERE
        is_same, is_common = self._arrive(tensor, deadline, self._digest, key, address)
        if not is_same:
            raise self._meeting.different_calls(self._call(tensor), deadline)
        return is_common

    def _arrive(
        self, tensor: torch.Tensor, deadline: Deadline, digest: int = 0, key: int = NOWHERE, address: int = NOWHERE
    ) -> tuple[bool, bool]:
        """As `GroupMeeting.barrier`, and as `Board.arrive`."""
        try:
            return self._board.arrive(deadline, digest, key, address)
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
        self._numel, self._dtype = numel, dtype = tensor.numel(), tensor.dtype
        self._flat: Kept[torch.Tensor] = Kept()
        slots = [board.slots_at(turn, numel, dtype) for turn in (0, 1)]
        self._turns = [(shown[board.mine].data_ptr(), always_of(shown, op, dtype)) for shown in slots]

    def __call__(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Combine in place: this rank's tensor is there before it meets the others."""
        mine, reduce = self._turns[(self._board.arrivals + 1) & 1]
        address = tensor.data_ptr()
        memmove(mine, address, self._nbytes)
        self._meet(tensor, deadline)
        if tensor.dim() == 1:
            reduce(out=tensor)
            return
        out = self._flat.get(address)
        if out is None:
            out = view_at(address, self._numel, self._dtype)
            self._flat.keep(address, out)
        reduce(out=out)
        mark_written(tensor)

    def after_meeting(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Meet once more."""
        self(tensor, deadline)


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

    reads = True

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

    def after_meeting(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Read what the others have, if all can be read."""
        addresses = self._board.addresses()
        if NOWHERE in addresses:
            self._otherwise(flat(tensor), self._op, self._call(tensor), deadline)
        else:
            self._reduction.run(tensor, addresses, lambda: self._arrive(tensor, deadline))
        mark_written(tensor)


class DecidedEachTime(Prepared):
    """Decides at each call what to do, as soon as the ranks have met.

    Args:
        board: of all ranks of the group.
        meeting: of the group.
        op: the reduction.
        call: one like those to come.
        anywhere: does it.
        elsewhere: does it after the meeting.
        reads: see `Prepared`.
    """

    def __init__(
        self,
        board: Board,
        meeting: GroupMeeting,
        op: Reduction,
        call: Collective,
        anywhere: AllReduce,
        elsewhere: AllReduce,
        *,
        reads: bool,
    ) -> None:
        super().__init__(board, meeting, op, call)
        self._anywhere = anywhere
        self._elsewhere = elsewhere
        self.reads = reads

    def __call__(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Combine in place, with the meeting that it takes."""
        self._anywhere(flat(tensor), self._op, self._call(tensor), deadline)
        mark_written(tensor)

    def after_meeting(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """The rest."""
        self._elsewhere(flat(tensor), self._op, self._call(tensor), deadline)
        mark_written(tensor)


class PreparedUnlessInWindow(Prepared):
    """Looks, as soon as the group has windows, whether all ranks have the tensor in one; it is reduced there then.

    Args:
        board: of all ranks of the group.
        meeting: of the group.
        memory: where the windows are.
        op: the reduction.
        call: one like those to come.
        elsewhere: what to do with tensors that are in none.
        prepare_elsewhere: tries to find something better than `DecidedEachTime` for that, when it has succeeded once.
    """

    def __init__(
        self,
        board: Board,
        meeting: GroupMeeting,
        memory: NodeMemory,
        op: Reduction,
        call: Collective,
        elsewhere: Prepared,
        prepare_elsewhere: Callable[[torch.Tensor, Collective], Prepared | None],
    ) -> None:
        super().__init__(board, meeting, op, call)
        self._memory = memory
        self._prepare_elsewhere = prepare_elsewhere
        self._elsewhere = elsewhere
        self.reads = elsewhere.reads
        self._in_windows: Kept[WindowAllReduce] = Kept()

    def __call__(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Combine in place."""
        if not self._memory.has_windows:
            self._elsewhere(tensor, deadline)
            self._find_better(tensor)
            return
        place = self._memory.find(tensor)
        is_common = self._meet(tensor, deadline, NOWHERE if place is None else place.key)
        if place is not None and is_common:
            reduction = self._in_windows.get(place.key)
            if reduction is None:
                reduction = WindowAllReduce(place, tensor.numel(), tensor.dtype, self._op)
                self._in_windows.keep(place.key, reduction, weight=len(reduction))
            reduction.run()
            self._arrive(tensor, deadline)
            mark_written(tensor)
        else:
            self.after_meeting(tensor, deadline)

    def after_meeting(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """It is in no window that all have."""
        self._elsewhere.after_meeting(tensor, deadline)
        self._find_better(tensor)

    def _find_better(self, tensor: torch.Tensor) -> None:
        if type(self._elsewhere) is DecidedEachTime:
            self._elsewhere = self._prepare_elsewhere(tensor, self._call(tensor)) or self._elsewhere
