"""All-reduce of large tensors between ranks that are each alone on a node: a ring whose pieces overlap."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from mpi4py import MPI

from ...contract.reduce_op import ReduceOp, divide
from ...contract.running_call import RunningCall
from ...host.reduction import reduce_into
from .call_verifier import CallVerifier
from .datatypes import memory
from .library import Tag, mpi_errors
from .waiting import MESSAGE_NAP_S

# A piece is reduced and passed on while the others of its part are on the wire. A part has this many, but none is small against
# what a message costs, or too large for the caches of a processor.
PIECES = 4
LEAST_PIECE_BYTES = 60 << 10
MOST_PIECE_BYTES = 512 << 10
# Open MPI's own for what it sends over TCP at once, with its header, and what it is where it is not set.
TCP_EAGER_LIMIT, _TCP_EAGER_BYTES, _HEADER_BYTES = "OMPI_MCA_btl_tcp_eager_limit", 64 << 10, 4 << 10
# For pieces that come in before they are reduced. With less the wire waits for the reduction.
LANDING_BYTES = 2 << 20
DTYPES = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})


class RingAllReduce:
    """Reduces in a ring, as Patarasu and Yuan, "Bandwidth Optimal All-reduce Algorithms", 2009, describe, piece by piece.

    The tensor is divided into as many parts as there are ranks, and each part into pieces. In the first p - 1 steps each rank
    passes a part on, adding its own terms, until every rank has one part of the result; in p - 1 more the results go around. A
    piece goes on as soon as it is there: the steps overlap, and only the first piece of each waits for the network's latency.

    Every wait is for a single message and has the deadline, also with MPI libraries whose collectives must block to be fast.
    The same inputs give the same bits in every run, and on every rank: each part is reduced by one chain of ranks.

    Cost, for n bytes and p ranks: each sends 2 n (p-1)/p bytes in 2 (p - 1) steps. Extra memory: `LANDING_BYTES`, and in Open
    MPI up to n/p on a rank that is slower than its network.

    Why not MPI's own: MPICH's over TCP sends a part as a whole, then reduces it as a whole, so that wire and processor wait for
    each other: 25 MiB between two hosts of 1 Gbit/s took it 1.5 to 1.8 times as long (see docs/figures.md, "Between hosts").

    Args:
        communicator: on which nobody else uses `Tag.RING`.
        verifier: of that communicator.
        piece_bytes: the largest piece; the same on all ranks. See `largest_piece_bytes`.
    """

    def __init__(self, communicator: MPI.Intracomm, verifier: CallVerifier, piece_bytes: int) -> None:
        self._communicator = communicator
        self._verifier = verifier
        self._rank = communicator.Get_rank()
        self._size = communicator.Get_size()
        self._landing = torch.empty(LANDING_BYTES, dtype=torch.uint8, device="cpu")
        self._piece_bytes = piece_bytes

    def run(self, tensor: torch.Tensor, op: ReduceOp, call: RunningCall, *, divisor: int = 1) -> None:
        """Reduce in place, after all ranks have come for the same call.

        Args:
            tensor: flat, in host memory, of one of `DTYPES`, with at least as many elements as there are ranks.
            op: one of those between ranks (see `core_op`).
            call: of which this is a part.
            divisor: of the result. Each rank divides the part that it has of it, piece by piece.
        """
        count = pieces_of_part(tensor.nbytes // self._size, self._piece_bytes)
        parts = [part.tensor_split(count) for part in tensor.tensor_split(self._size)]
        # Message n to the next rank has piece n of the route. Message n from the previous rank has piece n + count: its terms,
        # or in the second half of the steps the result.
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
            if number < sums:
                place = landing[number % depth][: place.numel()]
            else:  # where a piece lies that has gone, at the latest when the next rank has it
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
                    if number < sums:
                        reduce_into(piece, op, (piece, landing[number % depth][: piece.numel()]))
                        if number in last_sums:
                            divide(piece, divisor)
                    if number + count < messages:
                        sent.append(self._send(piece))
                    if number + depth < messages:
                        post(number + depth)
                for request in sent:
                    self._wait(request, call)
        except BaseException:
            self._verifier.abandon(sent, received, route, landing)
            raise

    def _send(self, piece: torch.Tensor) -> MPI.Request:
        return self._communicator.Isend((memory(piece), MPI.BYTE), (self._rank + 1) % self._size, Tag.RING)

    def _receive(self, place: torch.Tensor) -> MPI.Request:
        return self._communicator.Irecv((memory(place), MPI.BYTE), (self._rank - 1) % self._size, Tag.RING)

    def _wait(self, request: MPI.Request, call: RunningCall) -> None:
        self._verifier.run(call, lambda: request, longest_nap_s=MESSAGE_NAP_S, naps_at_once=True)


def pieces_of_part(nbytes: int, piece_bytes: int) -> int:
    """Into how many pieces a part of so many bytes is divided, on all ranks alike. A pure function."""
    size = min(max(nbytes // PIECES, LEAST_PIECE_BYTES), piece_bytes)
    return max(1, -(-nbytes // size))


def largest_piece_bytes(library: str = MPI.get_vendor()[0], environ: Mapping[str, str] = os.environ) -> int:
    """The largest piece that this rank would send.

    Open MPI sends over TCP at once what is within its limit, and what is larger only when the receiver has asked for it. The
    request waits in line behind all that its sender has sent: wire and ranks then move data in one direction at a time. The
    limit is the user's, in mpirun's words or the environment: Open MPI trusts that all ranks have the same.
    """
    given = environ.get(TCP_EAGER_LIMIT, "")
    limit = int(given) if given.isascii() and given.isdigit() else _TCP_EAGER_BYTES
    at_once = limit - _HEADER_BYTES if library == "Open MPI" else MOST_PIECE_BYTES
    return max(LEAST_PIECE_BYTES, min(at_once, MOST_PIECE_BYTES))
