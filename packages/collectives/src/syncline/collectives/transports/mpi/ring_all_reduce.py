"""All-reduce of large tensors in a ring, for ranks that are alone on their nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from mpi4py import MPI

from ...engine.call import Call
from ...reduce_op import ReduceOp, divide
from ...tensors.reduction import reduce_into
from .library import Tag, memory, mpi_errors
from .sync import MessageSync
from .waiting import MESSAGE_NAP_S

# A piece is reduced and passed on while other pieces of its part are on the wire. A part usually has this many pieces. It has
# fewer if a piece would be too small for the cost of a message, and more if a piece would be too large (`piece_bytes`).
PIECES = 4
LEAST_PIECE_BYTES = 60 << 10
MOST_PIECE_BYTES = 512 << 10
# Over TCP, Open MPI sends a message up to a certain size, the eager limit, without waiting for the receiver. The three values
# are the variable that sets this limit, the default limit, and the size of the message's header, which counts for the limit.
TCP_EAGER_LIMIT, _TCP_EAGER_BYTES, _HEADER_BYTES = "OMPI_MCA_btl_tcp_eager_limit", 64 << 10, 4 << 10
# Memory for pieces that have arrived and wait for their reduction. With less memory the wire waits for the reduction.
LANDING_BYTES = 2 << 20
DTYPES = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})


class RingAllReduce:
    """Reduces in a ring, piece by piece, as in Patarasu and Yuan, "Bandwidth Optimal All-reduce Algorithms", 2009.

    The tensor is divided into one part for each rank, and each part into pieces. In p - 1 steps, each rank adds its own terms
    to a part and sends this part to the next rank. Then every rank has one part of the result. In p - 1 more steps, the results
    go around the ring. A rank sends a piece as soon as the piece is ready, so the steps overlap.

    The order of the additions is fixed, so the same inputs give the same bits in every run and on every rank.

    Cost, for n bytes and p ranks: each rank sends 2 n (p-1)/p bytes in 2 (p - 1) steps. Extra memory: 2 MiB, and in Open MPI up
    to n/p bytes on a rank that is slower than its network. See docs/figures.md, "Between hosts", for a comparison with MPI's
    own all-reduce.

    Only this object may use the tag `Tag.RING` on the communicator. `piece_bytes` is the size of the largest piece, equal on
    all ranks; see `largest_piece_bytes`.
    """

    def __init__(self, communicator: MPI.Intracomm, sync: MessageSync, piece_bytes: int) -> None:
        self._communicator = communicator
        self._sync = sync
        self._rank = communicator.Get_rank()
        self._size = communicator.Get_size()
        self._landing = torch.empty(LANDING_BYTES, dtype=torch.uint8, device="cpu")
        self._piece_bytes = piece_bytes

    def run(self, tensor: torch.Tensor, op: ReduceOp, call: Call, *, divisor: int = 1) -> None:
        """Reduce the tensor in place. All ranks call this method, after they have compared the call (see `Sync.compare`).

        Args:
            tensor: flat, in host memory, of one of `DTYPES`, with at least as many elements as there are ranks.
            op: the reduction; not AVG or PREMUL_SUM.
            call: the call of this reduction, which has the time limit.
            divisor: this method divides the result by this number.
        """
        count = pieces_of_part(tensor.nbytes // self._size, self._piece_bytes)
        parts = [part.tensor_split(count) for part in tensor.tensor_split(self._size)]
        # The route lists the pieces in the order in which this rank sends them. Message n to the next rank is piece n of the
        # route. Message n from the previous rank is piece n + count: a partial sum in the first half, a result in the second.
        route = [piece for step in range(2 * self._size - 1) for piece in parts[(self._rank - step) % self._size]]
        messages, sums = len(route) - count, (self._size - 1) * count
        last_sums = range(sums - count, sums)
        largest = parts[0][0]
        depth = min(LANDING_BYTES // largest.nbytes, self._size * count)
        landing = torch.split(self._landing.view(tensor.dtype), largest.numel())
        sent: list[MPI.Request] = []
        received: list[MPI.Request] = []

        def post(number: int) -> None:
            place = route[number + count]
            # A partial sum lands outside the tensor, because its place in the tensor still holds this rank's own term.
            if number < sums:
                place = landing[number % depth][: place.numel()]
            else:  # a result goes straight to its place, which still holds a partial sum: wait until this sum has been sent
                self._wait(sent[number - sums], call)
            received.append(self._receive(place))

        try:
            with mpi_errors():
                sent += [self._send(piece) for piece in route[:count]]
                for number in range(depth):
                    post(number)
                for number in range(messages):
                    self._wait(received[number], call)
                    piece = route[number + count]
                    # In the first half, this rank adds its own term before it passes the piece on.
                    if number < sums:
                        reduce_into(piece, op, (piece, landing[number % depth][: piece.numel()]))
                        # These sums are complete, so this rank divides them once for all ranks.
                        if number in last_sums:
                            divide(piece, divisor)
                    # The last pieces have gone around the whole ring, so they go no further.
                    if number + count < messages:
                        sent.append(self._send(piece))
                    # Start to receive the next message: a partial sum, whose landing place is free again, or a result.
                    if number + depth < messages:
                        post(number + depth)
                for request in sent:
                    self._wait(request, call)
        except BaseException:  # MPI may still read and write the memory of the requests that are left
            self._sync.keep(sent, received, route, landing)
            raise

    def _send(self, piece: torch.Tensor) -> MPI.Request:
        return self._communicator.Isend((memory(piece), MPI.BYTE), (self._rank + 1) % self._size, Tag.RING)

    def _receive(self, place: torch.Tensor) -> MPI.Request:
        return self._communicator.Irecv((memory(place), MPI.BYTE), (self._rank - 1) % self._size, Tag.RING)

    def _wait(self, request: MPI.Request, call: Call) -> None:
        self._sync.run(call, lambda: request, longest_nap_s=MESSAGE_NAP_S, naps_at_once=True)


def pieces_of_part(nbytes: int, piece_bytes: int) -> int:
    """Return the number of pieces for a part of `nbytes` bytes. All ranks get the same number."""
    size = min(max(nbytes // PIECES, LEAST_PIECE_BYTES), piece_bytes)
    return max(1, -(-nbytes // size))


def largest_piece_bytes(library: str = MPI.get_vendor()[0], environ: Mapping[str, str] = os.environ) -> int:
    """Return the size in bytes of the largest piece that this rank would send in a ring all-reduce.

    Over TCP, Open MPI sends a message that exceeds its eager limit only when the receiver asks for the message. Then data moves
    in only one direction at a time. So pieces are not larger than the eager limit, which the user can set.
    """
    # Open MPI takes other notations, too. This function does not read them, and assumes Open MPI's default.
    given = environ.get(TCP_EAGER_LIMIT, "")
    limit = int(given) if given.isascii() and given.isdecimal() else _TCP_EAGER_BYTES
    at_once = limit - _HEADER_BYTES if library == "Open MPI" else MOST_PIECE_BYTES
    return max(LEAST_PIECE_BYTES, min(at_once, MOST_PIECE_BYTES))
