"""Which way a collective takes inside a node."""

from __future__ import annotations

import enum

import torch

from ....contract.collective import Collective
from ....contract.deadline import Deadline
from ....startup.crossovers import Crossovers
from ..transport import MEETING_BYTES
from .board import NOWHERE
from .exchange import MOST_RANKS, Exchange
from .group_meeting import GroupMeeting
from .hierarchy import Hierarchy
from .in_window import InWindow
from .memory import NodeMemory
from .peer_memory import readable_address
from .single_copy import SingleCopy
from .staging import STAGING_BYTES, Slots, Staged
from .way import FullWay, Way


class Native(enum.Enum):
    """How MPI itself would do a reduction."""

    NOT = enum.auto()
    USUAL = enum.auto()
    FAST = enum.auto()


def most_exchanged(hierarchy: Hierarchy, crossovers: Crossovers) -> int:
    """Up to which size the ranks of a group exchange tensors, in bytes; 0 if they do not."""
    size = hierarchy.node.Get_size()
    is_small = hierarchy.nodes == 1 and 1 < size <= MOST_RANKS
    return crossovers.exchange_bytes // (size - 1) if is_small else 0


class Ways:
    """Chooses; all ranks alike, because sizes are the same, and what lies where is agreed when the ranks meet.

    ============================ =======================================================
    tensors                      way
    ============================ =======================================================
    in a window                  `InWindow`
    small, of a few ranks        `Exchange`
    large                        `SingleCopy`, if permitted, but moves, which MPI does as well
    not that large, or refused   `Staged`, where it gains from it
    others                       none: MPI
    ============================ =======================================================

    Args:
        hierarchy: of the group. Ranks on several nodes have windows only.
        memory: of the group.
        meeting: of the group.
        crossovers: the same on all ranks.
    """

    def __init__(self, hierarchy: Hierarchy, memory: NodeMemory, meeting: GroupMeeting, crossovers: Crossovers) -> None:
        self._rank = hierarchy.node.Get_rank()
        self._size = hierarchy.node.Get_size()
        self._memory = memory
        self._meeting = meeting
        self._crossovers = crossovers
        self._slots: Slots | None = None
        self._may_stage = True
        self._most_exchanged = most_exchanged(hierarchy, crossovers)

    def of_reduction(self, tensor: torch.Tensor, native: Native, call: Collective, deadline: Deadline) -> Way | None:
        """For an `all_reduce` or `reduce_scatter` on one node. From `MEETING_BYTES` on the ranks have met, if it is none.

        Args:
            tensor: the larger one of the call.
            native: how MPI would do it itself.
            call: that one.
            deadline: of the call.
        """
        nbytes = tensor.nbytes
        is_small, is_read = self.is_small(nbytes, native), self.is_read(nbytes, native)
        if self.may_be_in_window(nbytes) or is_read or (nbytes >= MEETING_BYTES and not is_small):
            window = self._window(tensor, call, deadline, readable_address(tensor) if is_read else NOWHERE)
            if window is not None:
                return window
        return self.of_elsewhere(tensor, native, call, deadline)

    def of_elsewhere(self, tensor: torch.Tensor, native: Native, call: Collective, deadline: Deadline) -> Way | None:
        """As `of_reduction`, for a tensor that is in no window, after the meeting that there is for its size."""
        nbytes = tensor.nbytes
        addresses = self._meeting.addresses() if self.is_read(nbytes, native) else []
        if self.is_small(nbytes, native):
            exchange = self._exchange(nbytes, call, deadline)
            if exchange is not None:
                return exchange
            if nbytes >= MEETING_BYTES:  # it was to be the meeting
                self._meeting.meet(call, deadline)
        if addresses:
            single_copy = self._single_copy(addresses, call, deadline)
            if single_copy is not None:
                return single_copy
        return self.of_unreadable(tensor, native, call, deadline)

    def of_unreadable(self, tensor: torch.Tensor, native: Native, call: Collective, deadline: Deadline) -> Way | None:
        """As `of_reduction`, for a large tensor that is in no window, and that others cannot read."""
        if not self.is_staged(tensor.nbytes, native):
            return None
        return self._staged(call, deadline, has_met=tensor.nbytes >= MEETING_BYTES)

    def is_small(self, nbytes: int, native: Native) -> bool:
        """Whether a reduction of that size is exchanged."""
        most = self._most_exchanged
        if native is Native.FAST:
            # Those that MPI's ranks do not meet for are exchanged in any case: it compares them.
            fast = max(self._crossovers.exchange_bytes_fast_mpi // max(1, self._size - 1), MEETING_BYTES - 1)
            most = min(most, fast)
        return nbytes <= most

    def is_read(self, nbytes: int, native: Native) -> bool:
        """Whether what a reduction of that size needs is read where it is, if that can be."""
        crossovers = self._crossovers
        least = crossovers.single_copy_bytes_fast_mpi if native is Native.FAST else crossovers.single_copy_bytes
        return nbytes >= least * self._size and not self.is_small(nbytes, native)

    def is_staged(self, nbytes: int, native: Native) -> bool:
        """Whether a reduction of that size is staged, if what it needs cannot be read."""
        crossovers = self._crossovers
        return nbytes >= (crossovers.staged_bytes_not_native if native is Native.NOT else crossovers.staged_bytes)

    def fits_window(self, nbytes: int) -> bool:
        """Whether a tensor of that size is looked for in windows, if there are any."""
        return nbytes >= self._crossovers.window_bytes

    def of_move(self, tensor: torch.Tensor, shown_bytes: int, call: Collective, deadline: Deadline) -> FullWay | None:
        """For a `broadcast` or `all_gather` on one node.

        Args:
            tensor: the larger one of the call.
            shown_bytes: what a rank would show to the others.
            call: that one.
            deadline: of the call.
        """
        window = self.window(tensor, call, deadline)
        if window is not None or shown_bytes >= MEETING_BYTES:
            return window
        # MPI would be as fast, but below this size it does not compare what the ranks are about to do.
        return self._exchange(shown_bytes, call, deadline)

    def window(self, tensor: torch.Tensor, call: Collective, deadline: Deadline) -> InWindow | None:
        """Where all ranks have the tensor, if in a window. Unless that is plain from its size, the ranks meet to know."""
        return self._window(tensor, call, deadline, NOWHERE) if self.may_be_in_window(tensor.nbytes) else None

    def may_be_in_window(self, nbytes: int) -> bool:
        """Whether a tensor of that size is looked for in windows, so that the ranks meet to compare where it lies."""
        return self._memory.has_windows and self.fits_window(nbytes)

    def _window(self, tensor: torch.Tensor, call: Collective, deadline: Deadline, address: int) -> InWindow | None:
        """As `window`, but the ranks meet at any size, and say where their tensors can be read."""
        place = self._memory.find(tensor) if self.may_be_in_window(tensor.nbytes) else None
        is_common = self._meeting.meet(call, deadline, NOWHERE if place is None else place.key, address)
        if place is None or not is_common:
            return None
        return InWindow(place, lambda: self._meeting.barrier(call, deadline))

    def forget(self) -> None:
        """Give back what is kept for the next call."""
        self._slots = None

    def _exchange(self, shown_bytes: int, call: Collective, deadline: Deadline) -> Exchange | None:
        if not 0 < shown_bytes <= self._most_exchanged:
            return None
        board = self._meeting.board(call, deadline)
        if board is None:
            self._most_exchanged = 0
            return None
        return Exchange(board, lambda: self._meeting.meet(call, deadline))

    def _single_copy(self, addresses: list[int], call: Collective, deadline: Deadline) -> SingleCopy | None:
        peers = self._meeting.peers(call, deadline)
        if peers is None or NOWHERE in addresses:
            return None
        return SingleCopy(peers, self._rank, addresses, lambda: self._meeting.barrier(call, deadline))

    def _staged(self, call: Collective, deadline: Deadline, *, has_met: bool) -> Staged | None:
        if self._may_stage:
            if not has_met:
                self._meeting.meet(call, deadline)
            if self._slots is None:
                segment = self._memory.share(STAGING_BYTES, call, deadline)
                self._slots = None if segment is None else Slots(segment)
                self._may_stage = self._slots is not None
        slots = self._slots
        return None if slots is None else Staged(slots, lambda: self._meeting.barrier(call, deadline))
