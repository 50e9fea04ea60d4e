"""Where the ranks of a group meet: on a board if they share a node, else by messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from mpi4py import MPI

from ....contract.collective import Collective
from ....contract.deadline import Deadline
from ....errors import DisagreementError, TransportError
from ..inquest import Inquest
from ..library import mapped, mpi_errors
from ..meeting import Meeting
from ..tags import Tag
from .board import NOTE_BYTES, NOWHERE, Board, GaveUpError, board_bytes
from .hierarchy import Hierarchy
from .peer_memory import Introduction, PeerMemory
from .segment import Segment


class GroupMeeting:
    """Lets all ranks of a group meet, or those of a node, by the fastest means that there is.

    The board is made when the ranks meet for the first time: a group that never communicates has none.

    Args:
        hierarchy: who is on which node.
        communicator: of the whole group, private.
        meeting: by messages, of the whole group.
        inquest: asks the ranks after a time-out.
        share: makes memory that the ranks of a node share, or returns None on all ranks.
        slot_bytes: how much each rank shall be able to show on the board.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        communicator: MPI.Intracomm,
        meeting: Meeting,
        inquest: Inquest,
        share: Callable[[int, Collective, Deadline], Segment | None],
        slot_bytes: int,
    ) -> None:
        self._slot_bytes = max(slot_bytes, NOTE_BYTES)
        self._hierarchy = hierarchy
        self._communicator = communicator
        self._meeting = meeting
        self._inquest = inquest
        self._share = share
        self._is_one_node = hierarchy.nodes == 1
        self._board: Board | None = None
        self._peers: PeerMemory | None = None
        self._may_have_peers: bool = self._is_one_node
        self._may_have_board = hierarchy.shares_memory and hierarchy.is_ordered

    @property
    def board_if_made(self) -> Board | None:
        """That of this node, if the ranks have met there before."""
        return self._board

    @property
    def peers_if_made(self) -> PeerMemory | None:
        """The memory of all ranks, if they have read it before; the same on all ranks."""
        return self._peers

    @property
    def may_have_peers(self) -> bool:
        """Whether the ranks read one another's memory, or have not tried yet; the same on all ranks."""
        return self._may_have_peers

    def board(self, call: Collective, deadline: Deadline) -> Board | None:
        """That of this node. All ranks of the group call it at the same point of their order of collectives."""
        if self._board is None and self._may_have_board:
            self._meeting.meet(call, deadline)
            segment = self._share(board_bytes(self._slot_bytes), call, deadline)
            if segment is None:
                self._may_have_board = False
            else:
                probe, rank = self._communicator.Iprobe, self._communicator.Get_rank()
                self._board = Board(segment, self._slot_bytes, lambda: probe(rank, Tag.NOTHING))
        return self._board

    def peers(self, call: Collective, deadline: Deadline) -> PeerMemory | None:
        """The memory of all ranks, if all are on one node and each can read the others'. Called as `board` is."""
        if self._peers is None and self._may_have_peers:
            board = self.board(call, deadline)
            self._peers = None if board is None else self._introduced(board, call, deadline)
            self._may_have_peers = self._peers is not None
        return self._peers

    def addresses(self) -> list[int]:
        """What all ranks gave as address when they met last, if they are on one node and have a board; else nothing."""
        return self._board.addresses() if self._board is not None and self._is_one_node else []

    def give_up(self) -> None:
        """Let the others know that this rank will not come any more."""
        if self._board is not None:
            self._board.give_up()

    def forget(self) -> None:
        """Give the board back."""
        self._board, self._peers = None, None
        self._may_have_board = self._may_have_peers = False

    def _introduced(self, board: Board, call: Collective, deadline: Deadline) -> PeerMemory | None:
        introduction = Introduction()
        peers = introduction.answered(self._shown(board, introduction.words, call, deadline), board.mine)
        answers = self._shown(board, [peers is not None], call, deadline)
        return peers if all(can_read for (can_read,) in answers) else None

    def _shown(self, board: Board, mine: list[int], call: Collective, deadline: Deadline) -> list[list[int]]:
        """What all ranks show, who have as many integers each."""
        slots = board.slots(len(mine), torch.int64)
        slots[board.mine].copy_(torch.tensor(mine, device="cpu"))
        self._arrive(board, call, deadline)
        return [slot.tolist() for slot in slots]

    def meet(self, call: Collective, deadline: Deadline, key: int = NOWHERE, address: int = NOWHERE) -> bool:
        """As `Meeting.meet`, of all ranks of the group. See `addresses`."""
        board = self._board or self.board(call, deadline)
        if board is None or not self._is_one_node:
            return self._meeting.meet(call, deadline, key)
        is_same, is_common = self._arrive(board, call, deadline, call.digest(), key, address)
        if not is_same:
            raise self.different_calls(call, deadline)
        return is_common

    def different_calls(self, call: Collective, deadline: Deadline) -> DisagreementError:
        """As `Meeting.different_calls`."""
        return self._meeting.different_calls(call, deadline)

    def run(self, call: Collective, start: Callable[[], MPI.Request], deadline: Deadline) -> None:
        """As `Meeting.run`."""
        self._meeting.run(call, start, deadline)

    def barrier(self, call: Collective, deadline: Deadline) -> None:
        """Of the ranks of this node."""
        if self._board is None:
            self._meeting.run(call, self._hierarchy.node.Ibarrier, deadline)
        else:
            self._arrive(self._board, call, deadline)

    def _arrive(
        self,
        board: Board,
        call: Collective,
        deadline: Deadline,
        digest: int = 0,
        key: int = NOWHERE,
        address: int = NOWHERE,
    ) -> tuple[bool, bool]:
        try:
            return board.arrive(deadline, digest, key, address)
        except Exception as error:  # noqa: BLE001 - raised again
            self.explain(error, call, deadline)

    def explain(self, error: Exception, call: Collective, deadline: Deadline) -> NoReturn:
        """Raise what the board raised in a call, in the words of a group."""
        if isinstance(error, GaveUpError):
            raise TransportError(
                f"rank {error.rank} of this node gave up on a collective of this group; its own error says why"
            ) from None
        if isinstance(error, MPI.Exception):
            raise mapped(error) from error
        if isinstance(error, TimeoutError) and not deadline.was_cancelled:
            with mpi_errors():
                raise TimeoutError(self._inquest.hold(call.signature())) from None
        raise error
