"""All-reduce of large tensors between ranks that are each alone on a node: a ring whose pieces overlap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

import torch
from mpi4py import MPI

from ...contract.reduce_op import ReduceOp
from ...contract.running_call import RunningCall
from ...host.reduction import reduce_into
from .call_verifier import CallVerifier
from .datatypes import memory
from .library import Tag, mpi_errors

# A piece is reduced while the next ones are on the wire: large against a network's latency, small against a part.
PIECE_BYTES = 1 << 20
# Receives that are posted ahead. With fewer the wire waits for the reduction.
DEPTH = 4
DTYPES = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})

_Part = list[torch.Tensor]


class RingAllReduce:
    """Reduces in two rounds of a ring, as Patarasu and Yuan, "Bandwidth Optimal All-reduce Algorithms", 2009, describe.

    The tensor is divided into as many parts as there are ranks. In the first round each rank passes a part on p - 1 times,
    adding its own terms, until every rank has one part of the result; in the second round the results go around.

    Every wait is for a single message and has the deadline, also with MPI libraries whose collectives must block to be fast.
    The same inputs give the same bits in every run, and on every rank: each part is reduced by one chain of ranks.

    Cost, for n bytes and p ranks: each sends 2 n (p-1)/p bytes in 2 (p - 1) steps. Extra memory: `DEPTH` pieces.

    Why not MPI's own: MPICH's over TCP sends a part as a whole, then reduces it as a whole, so that wire and processor wait for
    each other: 25 MiB between two hosts of 1 Gbit/s took it 1.5 to 1.8 times as long (see docs/figures.md, "Between hosts").

    Args:
        communicator: on which nobody else uses `Tag.RING`.
        verifier: of that communicator.
    """

    def __init__(self, communicator: MPI.Intracomm, verifier: CallVerifier) -> None:
        self._communicator = communicator
        self._verifier = verifier
        self._rank = communicator.Get_rank()
        self._size = communicator.Get_size()
        self._landing: torch.Tensor | None = None

    def run(self, tensor: torch.Tensor, op: ReduceOp, call: RunningCall) -> None:
        """Reduce in place, after all ranks have come for the same call.

        Args:
            tensor: flat, in host memory, of one of `DTYPES`, with at least as many elements as there are ranks.
            op: one of those between ranks (see `core_op`).
            call: of which this is a part.
        """
        step = PIECE_BYTES // tensor.element_size()
        parts = [list(torch.split(part, step)) for part in tensor.tensor_split(self._size)]
        landing = self._pieces_to_land(tensor.dtype, step)
        rank, size = self._rank, self._size
        for turn in range(size - 1):
            arriving = parts[(rank - turn - 1) % size]
            room = [landing[number % DEPTH][: piece.numel()] for number, piece in enumerate(arriving)]
            self._pass_on(parts[(rank - turn) % size], room, _adding(arriving, op), call)
        for turn in range(size - 1):
            self._pass_on(parts[(rank - turn + 1) % size], parts[(rank - turn) % size], None, call)

    def _pieces_to_land(self, dtype: torch.dtype, step: int) -> list[torch.Tensor]:
        if self._landing is None:
            self._landing = torch.empty(DEPTH * PIECE_BYTES, dtype=torch.uint8)
        return list(torch.split(self._landing.view(dtype), step))

    def _pass_on(
        self,
        departing: _Part,
        room: _Part,
        arrived: Callable[[torch.Tensor, int], None] | None,
        call: RunningCall,
    ) -> None:
        """Send a part to the next rank while one of the previous rank's comes in; `arrived` is told of each piece, in order."""
        following, previous = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        with mpi_errors():
            receives = (self._communicator.Irecv((memory(piece), MPI.BYTE), previous, Tag.RING) for piece in room)
            posted = list(islice(receives, DEPTH))
            sent = [self._communicator.Isend((memory(piece), MPI.BYTE), following, Tag.RING) for piece in departing]
        try:
            for number, piece in enumerate(room):
                self._verifier.run(call, partial(posted.__getitem__, number))
                if arrived is not None:
                    arrived(piece, number)
                with mpi_errors():
                    posted += islice(receives, 1)
            for request in sent:
                self._verifier.run(call, lambda request=request: request)  # type: ignore[misc]
        except BaseException:
            self._verifier.abandon(posted, sent, departing, room)
            raise


def _adding(terms: _Part, op: ReduceOp) -> Callable[[torch.Tensor, int], None]:
    def add(piece: torch.Tensor, number: int) -> None:
        reduce_into(terms[number], op, (terms[number], piece))

    return add
