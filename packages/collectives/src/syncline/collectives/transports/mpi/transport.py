"""`MPITransport`: collectives on one MPI communicator."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from mpi4py import MPI
from typing_extensions import override

from ...engine.call import Call, Signature
from ...engine.cancel_scope import CancelScope
from ...engine.tags import LAST_MESSAGE, wire_tag
from ...engine.transport import LibraryPlan, LibraryTransport, Plan, Request, Transport
from ...errors import TransportError
from ...health.stalls import StatusPost
from ...reduce_op import REDUCIBLE, PremulSum, ReduceOp, Reduction, divide
from ...tensors.layout import ONE_TENSOR, bytes_of
from ...tensors.reduction import core_op, reduce_in_rank_order
from .library import (
    MPIRequest,
    Tag,
    failed_ranks,
    is_fault_tolerant,
    library_name,
    memory,
    message,
    mpi_errors,
    mpi_reduction,
    revoke,
    revoked_on_failure,
)
from .neighbours import MPIStatusPost, TimeoutReport
from .ring_all_reduce import DTYPES as RING_DTYPES
from .ring_all_reduce import RingAllReduce
from .sync import MessageSync, Sync
from .waiting import ARRIVAL_NAP_S, MESSAGE_NAP_S, NO_NAP_S

logger = logging.getLogger("syncline.collectives")

# MPI before version 4 counts in C ints. A tensor with more than `PIECE_BYTES` is sent in pieces of this size, or as one message
# whose MPI type consists of such pieces.
PIECE_BYTES = 1 << 30

# From this size on, the ranks synchronise before the collective; see Note [Presync]. For smaller tensors, Open MPI's
# non-blocking form takes at most 3 us longer than the blocking form.
PRESYNC_MIN_BYTES = 32 << 10
BLOCKS_WELL = MPI.get_vendor()[0] == "Open MPI" and not is_fault_tolerant()

_TAGS = 32_767  # MPI guarantees at least this many

# How long a rank that closes the communicators waits for the last messages of other ranks, which also close the communicators.
_CLOSE_S = 5.0


class MPITransport(LibraryTransport):
    """Carries out collectives with MPI.

    MPI itself does most collectives and reductions. This class itself does the following reductions:

    - float16 and bfloat16, because MPI has no portable type for them;
    - sums of small integers, and MIN and MAX of floats (see `mpi_reduction`);
    - each `reduce_scatter`;
    - all reductions, if `reproducible` is True.

    For these reductions, each rank owns a slice of the tensor. An all-to-all moves all terms of a slice to its owner, which
    reduces them in rank order. Then an `all_reduce` needs an all-gather, and a `reduce` needs a gather. Cost of such an
    `all_reduce`, for n bytes and p ranks: each rank sends 2 n (p-1)/p bytes, and needs 2 n bytes of extra memory.

    Args:
        communicator: a communicator. Only this transport may use it.
        reproducible: whether to reduce in rank order. Then the same inputs give the same bits in every run.
        report: after a time-out, finds out in which calls the other ranks wait. None: make a new report for this communicator.
        on_device: whether tensors are in a device's memory, which the MPI library must support.
    """

    backend_name = "mpi"

    # A rank that has not closed the group may still send messages. If this rank freed its communicator, MPI would keep the
    # messages, and give them to this rank's next communicator with the same number. See also `_drop_unreceived`.
    closes_together = True

    def __init__(
        self,
        communicator: MPI.Intracomm,
        *,
        reproducible: bool = False,
        report: TimeoutReport | None = None,
        on_device: bool = False,
    ) -> None:
        self._communicator = communicator
        self._on_device = on_device
        self._size = communicator.Get_size()
        self._rank = communicator.Get_rank()
        self._reproducible = reproducible
        self._private = communicator.Dup()
        self._largest_tag = int(communicator.Get_attr(MPI.TAG_UB) or _TAGS)
        with revoked_on_failure(self._private):
            self._report = report or TimeoutReport(self._private)
        self._messages = MessageSync(self._private, self._report)
        self._sent_to: set[int] = set()
        self._starters: dict[str, Callable[..., MPI.Request]] = {}
        self._ring: RingAllReduce | None = None
        self._ring_min_bytes = 0

    def describe(self) -> str:
        """Return the MPI library's name and version."""
        return f"mpi: {library_name()}"

    def use_ring(self, ring_bytes: int, piece_bytes: int) -> None:
        """Reduce large tensors in a ring from now on. Call this method only if each rank is alone on its node.

        The ring takes tensors with at least `ring_bytes` bytes for each rank. The largest piece that a rank sends has
        `piece_bytes` bytes. `ring_bytes` and `piece_bytes` are equal on all ranks.
        """
        # A group of one rank needs no ring. The ring reduces on the host, so it cannot take the memory of a device.
        if self._size > 1 and not self._on_device:
            self._ring = RingAllReduce(self._private, self._messages, piece_bytes)
            self._ring_min_bytes = max(PRESYNC_MIN_BYTES, ring_bytes * self._size)

    def sync(self, call: Call) -> Sync:
        """Return the object with which all ranks wait for one another and compare their calls."""
        return self._messages

    @override
    def plan(self, signature: Signature) -> Plan:
        return MPIPlan(self, signature, self._size)

    # ---- reductions. For a large call, all ranks have come already: see Note [Presync] ----

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, call: Call) -> None:
        """Reduce with MPI or in a ring. If MPI cannot do this reduction, move bytes with MPI and reduce in this process."""
        native = self._native(tensor.dtype, op)
        # If MPI cannot reduce this dtype, or must not choose the order, this process reduces.
        if native is None:
            for piece in _pieces(tensor):
                self._all_reduce_here(piece, op, call)
            return
        self._scale_before(tensor, op)
        if self._ring is not None and tensor.nbytes >= self._ring_min_bytes and tensor.dtype in RING_DTYPES:
            self._ring.run(tensor, core_op(op), call, divisor=self._size if op is ReduceOp.AVG else 1)
            return
        datatype, mpi = native
        for piece in _pieces(tensor):
            spec = (memory(piece), piece.numel(), datatype)
            self._collective("Allreduce", (MPI.IN_PLACE, spec, mpi), piece.nbytes, call)
        self._scale_after(tensor, op)

    def all_reduce_widened(self, wide: torch.Tensor, op: ReduceOp, divisor: int, tensor: torch.Tensor, call: Call) -> None:
        """All-reduce a tensor of a wider dtype. The result is divided, and rounded once to the narrower dtype of `tensor`.

        Cost, for n elements and p ranks: each rank sends n (p-1)/p wide elements and n (p-1)/p narrow elements.

        Args:
            wide: this rank's terms, at most 1 GiB.
            op: the reduction; not AVG or PREMUL_SUM.
            divisor: this method divides the result by this number.
            tensor: gets the result; as many elements as `wide`.
            call: the call of this reduction.
        """
        self._hand_out(self._reduced_slice(wide, op, call).div_(divisor), tensor, call)

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction, call: Call) -> None:
        """Reduce with MPI. If MPI cannot do this reduction, move bytes with MPI and reduce in this process."""
        native = self._native(tensor.dtype, op)
        if native is None:
            for piece in _pieces(tensor):
                self._reduce_here(piece, root, op, call)
            return
        # If this rank is not the root, its tensor must not be changed, so scale a copy.
        source = tensor.clone() if isinstance(op, PremulSum) and self._rank != root else tensor
        self._scale_before(source, op)
        datatype, mpi = native
        for piece in _pieces(source):
            spec = (memory(piece), piece.numel(), datatype)
            sides = (MPI.IN_PLACE, spec) if self._rank == root else (spec, None)
            self._collective("Reduce", (*sides, mpi, root), piece.nbytes, call)
        if self._rank == root:
            self._scale_after(tensor, op)

    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction, call: Call) -> None:
        """Receive this rank's part of the block of every rank. Reduce these parts in rank order."""
        rows = block.view(self._size, tensor.numel())
        step = self._piece_numel(tensor)
        results = []
        for start in range(0, tensor.numel(), step):
            columns = rows[:, start : start + step].contiguous()
            terms = torch.empty_like(columns)
            self._all_to_all_here(terms, columns, [columns[0].nbytes] * self._size, columns[0].nbytes, call)
            results.append(reduce_in_rank_order(op, list(terms)))
        if results:
            tensor.copy_(torch.cat(results))

    # ---- moves ----

    def broadcast(self, tensor: torch.Tensor, root: int, call: Call) -> None:
        """Broadcast the tensor as bytes."""
        for piece in _pieces(tensor):
            spec = (memory(piece), MPI.BYTE)
            self._collective("Bcast", (spec, root), piece.nbytes, call)

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor, call: Call) -> None:
        """All-gather the tensors as bytes. No copy is needed if the tensor is already this rank's part of the block."""
        if tensor.dtype not in REDUCIBLE:  # torch cannot copy some of the other dtypes, so copy bytes
            block, tensor = bytes_of(block), bytes_of(tensor)
        part = block.view(self._size, tensor.numel())[self._rank]
        if part.data_ptr() != tensor.data_ptr():
            part.copy_(tensor)
        # A block of at most 1 GiB takes one MPI call. A larger block would exceed MPI's counts, so broadcast it row by row.
        if block.nbytes <= PIECE_BYTES:
            spec = (memory(block), MPI.BYTE)
            self._collective("Allgather", (MPI.IN_PLACE, spec), block.nbytes, call)
            return
        for root, row in enumerate(block.view(self._size, tensor.numel())):
            self.broadcast(row, root, call)

    def gather(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: Call) -> None:
        """Gather the tensors as bytes."""
        rows = None if block is None else block.view(self._size, tensor.numel())
        step = self._piece_numel(tensor)
        for start in range(0, tensor.numel(), step):
            piece = tensor[start : start + step]
            landing = None if rows is None else tensor.new_empty((self._size, piece.numel()))
            there = None if landing is None else (memory(landing), MPI.BYTE)
            here = (memory(piece), MPI.BYTE)
            self._collective("Gather", (here, there, root), piece.nbytes * self._size, call)
            if rows is not None and landing is not None:
                rows[:, start : start + step].copy_(landing)

    def scatter(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: Call) -> None:
        """Scatter the block as bytes."""
        rows = None if block is None else block.view(self._size, tensor.numel())
        step = self._piece_numel(tensor)
        for start in range(0, tensor.numel(), step):
            piece = tensor[start : start + step]
            departing = None if rows is None else rows[:, start : start + step].contiguous()
            there = None if departing is None else (memory(departing), MPI.BYTE)
            here = (memory(piece), MPI.BYTE)
            self._collective("Scatter", (there, here, root), piece.nbytes * self._size, call)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        call: Call,
    ) -> None:
        """Send one message from each rank to each rank, as bytes."""
        # Do not use MPI's own all-to-all: no rank knows whether the size of another pair of ranks exceeds a C int.
        requests = []
        with mpi_errors():
            for peer, part in enumerate(torch.split(output, list(output_counts))):
                requests += [self._private.Irecv((memory(p), MPI.BYTE), peer, Tag.PAIRWISE) for p in _pieces(part)]
            for peer, part in enumerate(torch.split(tensor, list(input_counts))):
                requests += [self._private.Isend((memory(p), MPI.BYTE), peer, Tag.PAIRWISE) for p in _pieces(part)]
        for request in requests:
            self._messages.run(call, lambda request=request: request, longest_nap_s=MESSAGE_NAP_S)  # type: ignore[misc]

    @override
    def barrier(self, call: Call) -> None:
        self._messages.run(call, self._communicator.Ibarrier)

    # ---- two ranks ----

    def start_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Request:
        """Start a send with `MPI_Isend`."""
        MPIRequest.free_abandoned()
        self._sent_to.add(dst)
        with mpi_errors():
            wire = wire_tag(tag, tensor.dtype, self._largest_tag)
            return MPIRequest(self._communicator.Isend(message(tensor, PIECE_BYTES), dst, wire), tensor)

    def start_recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Request:
        """Start a receive with `MPI_Irecv`."""
        MPIRequest.free_abandoned()
        with mpi_errors():
            source = MPI.ANY_SOURCE if src is None else src
            wire = wire_tag(tag, tensor.dtype, self._largest_tag)
            return MPIRequest(self._communicator.Irecv(message(tensor, PIECE_BYTES), source, wire), tensor, receives=True)

    # ---- life ----

    @override
    def status_post(self) -> StatusPost:
        return MPIStatusPost(self._private)

    def subset(self, members: Sequence[int], name: str, number: int, scope: CancelScope) -> Transport:
        """Make a transport over a new communicator of the members. MPI has no time limit for this step."""
        communicator = self._communicator_of(members, number)
        return MPITransport(communicator, reproducible=self._reproducible, on_device=self._on_device)

    def close(self) -> None:
        """Free the communicators. All ranks call this method. Afterwards, no rank may send status lines by `MPIStatusPost`."""
        try:
            with mpi_errors():
                self._drop_unreceived(Call(Signature("close"), scope=CancelScope(_CLOSE_S)))
        except (TimeoutError, TransportError) as error:
            # A rank has been lost meanwhile. The communicators stay until the process ends, so that nobody gets their messages.
            logger.info("rank %d keeps the communicators of a group that it has closed: %s", self._rank, error)
            return
        self.status_post().posted()  # receive the lines that nobody has read; see `closes_together`
        self._private.Free()
        self._communicator.Free()

    def _drop_unreceived(self, call: Call) -> None:
        """Receive and drop the messages that no rank has received, and log a warning. All ranks call this method.

        MPI does not drop these messages when it frees the communicator. A later communicator with the same internal number
        would get the messages.

        Cost: an all-to-all of one number for each pair of ranks, an empty message to each rank to which this rank has sent, and
        a barrier.
        """
        # [1] Which ranks have sent messages to this rank?
        mine = array("q", [rank in self._sent_to for rank in range(self._size)])
        theirs = array("q", [0] * self._size)
        told = ([mine, MPI.INT64_T], [theirs, MPI.INT64_T])
        self._messages.run(call, lambda: self._private.Ialltoall(*told))
        # [2] MPI keeps the order of a rank's messages. So if the last message of a rank is here, all its messages are here.
        last, nothing = wire_tag(LAST_MESSAGE, torch.uint8, self._largest_tag), [bytearray(), MPI.BYTE]
        for rank in sorted(self._sent_to):
            self._messages.run(call, lambda rank=rank: self._communicator.Isend(nothing, rank, last))  # type: ignore[misc]
        # Receive from each rank separately: see Note [A receive for each rank] in `stores.over_group`.
        for rank in (rank for rank in range(self._size) if theirs[rank]):
            self._messages.run(call, lambda rank=rank: self._communicator.Irecv(nothing, rank, last))  # type: ignore[misc]
        # [3] The messages that are left were never received.
        dropped, status = Counter[int](), MPI.Status()
        while (found := self._communicator.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            landing = torch.empty(status.Get_elements(MPI.BYTE), dtype=torch.uint8, device="cpu")
            dropped[status.Get_source()] += 1
            self._messages.run(
                call,
                lambda found=found, landing=landing: found.Irecv(message(landing, PIECE_BYTES)),  # type: ignore[misc]
                longest_nap_s=MESSAGE_NAP_S,
            )
        for rank, number in sorted(dropped.items()):
            logger.warning(
                "rank %d closes a group and drops %d message(s) from rank %d that it has never received: let a recv follow "
                "each send before the group is closed",
                self._rank,
                number,
                rank,
            )
        # [4] The sender of a large message must call MPI until the message is received.
        self._messages.run(call, self._private.Ibarrier)

    @override
    def lost_ranks(self) -> Sequence[int]:
        return failed_ranks(self._communicator)

    def interrupt(self) -> None:
        """With ULFM (MPI's fault tolerance), end all operations on the communicators with an error, on all ranks.

        Without ULFM, do nothing.
        """
        revoke((self._communicator, self._private))

    def abort(self) -> None:
        """Do nothing. MPI can wake the other ranks only by ending the job, and only the program may end the job."""

    def _communicator_of(self, members: Sequence[int], number: int) -> MPI.Intracomm:
        with mpi_errors():
            whole = self._communicator.Get_group()
            part = whole.Incl(list(members))
            try:
                # Only the members call Create_group, so no rank outside of the subset has to take part. Open MPI sends messages
                # with this tag, which a pending receive of the program could take. So use a communicator and tags on which
                # nobody else receives.
                return self._private.Create_group(part, tag=Tag.SUBSET + number % (_TAGS - Tag.SUBSET))
            finally:
                part.Free()
                whole.Free()

    def takes_ring(self, signature: Signature) -> bool:
        """Return whether calls of this signature use the ring instead of MPI's all-reduce."""
        if signature.name != "all_reduce" or self._native(signature.element_dtype, signature.reduction) is None:
            return False
        return self._ring is not None and signature.nbytes >= self._ring_min_bytes and signature.dtype in RING_DTYPES

    # ---- reducing here ----

    def _native(self, dtype: torch.dtype, op: Reduction) -> tuple[MPI.Datatype, MPI.Op] | None:
        return None if self._reproducible else mpi_reduction(dtype, op)

    def _all_reduce_here(self, tensor: torch.Tensor, op: Reduction, call: Call) -> None:
        self._hand_out(self._reduced_slice(tensor, op, call), tensor, call)

    def _hand_out(self, mine: torch.Tensor, tensor: torch.Tensor, call: Call) -> None:
        counts = self._byte_counts(tensor)
        tensor.tensor_split(self._size)[self._rank].copy_(mine)
        spec = (memory(tensor), (counts, _starts(counts)), MPI.BYTE)
        self._collective("Allgatherv", (MPI.IN_PLACE, spec), tensor.nbytes, call)

    def _reduce_here(self, tensor: torch.Tensor, root: int, op: Reduction, call: Call) -> None:
        counts = self._byte_counts(tensor)
        mine = self._reduced_slice(tensor, op, call)
        there = (memory(tensor), (counts, _starts(counts)), MPI.BYTE) if self._rank == root else None
        self._collective("Gatherv", ((memory(mine), MPI.BYTE), there, root), tensor.nbytes, call)

    def _reduced_slice(self, tensor: torch.Tensor, op: Reduction, call: Call) -> torch.Tensor:
        counts = self._byte_counts(tensor)
        terms = tensor.new_empty((self._size, counts[self._rank] // tensor.element_size()))
        self._all_to_all_here(terms, tensor, counts, counts[self._rank], call)
        return reduce_in_rank_order(op, list(terms))

    def _byte_counts(self, tensor: torch.Tensor) -> list[int]:
        return [piece.nbytes for piece in tensor.tensor_split(self._size)]

    def _all_to_all_here(self, terms: torch.Tensor, tensor: torch.Tensor, sent: list[int], received: int, call: Call) -> None:
        """Exchange parts by MPI's Alltoallv: at most 1 GiB on each rank. Every rank knows the sizes of all parts."""
        there = (memory(tensor), (sent, _starts(sent)), MPI.BYTE)
        here = (memory(terms), ([received] * self._size, [received * r for r in range(self._size)]), MPI.BYTE)
        self._collective("Alltoallv", (there, here), tensor.nbytes, call)

    def _scale_before(self, tensor: torch.Tensor, op: Reduction) -> None:
        if isinstance(op, PremulSum):
            tensor.mul_(op.factor)

    def _scale_after(self, tensor: torch.Tensor, op: Reduction) -> None:
        if op is ReduceOp.AVG:
            divide(tensor, self._size)

    # ---- running ----

    def _piece_numel(self, tensor: torch.Tensor) -> int:
        return max(1, PIECE_BYTES // (tensor.element_size() * self._size))

    def presync(self, nbytes: int, call: Call) -> None:
        """Before a large collective, wait for all ranks and compare the call. `nbytes` is the same on every rank.

        Note [Presync]
        ~~~~~~~~~~~~~~
        MPI's collectives have a blocking and a non-blocking form. A thread cannot leave a blocking call, so a time limit needs
        the non-blocking form. But in Open MPI the non-blocking form is slower: with version 5.0, two ranks of a node all-reduce
        4 MiB in 7,900 us instead of 690 us.

        So with Open MPI we use the blocking form for a large collective, but only after all ranks have come for the same call.
        If a rank dies while the data moves, the monitor ends the process. A job that must survive the loss of a rank (ULFM)
        uses the non-blocking form.

        With MPICH and Intel MPI we use the non-blocking form, which is as fast there. While one thread blocks inside these
        libraries, no other thread of the process can communicate. Two groups that communicate in a different order on each rank
        would wait for ever.

        For CUDA memory, we use the blocking form, because Open MPI crashes in the non-blocking form.
        """
        if nbytes >= PRESYNC_MIN_BYTES or self._on_device or self.compares_every_call:
            self.sync(call).compare(call)

    def _collective(self, name: str, arguments: tuple[Any, ...], nbytes: int, call: Call) -> None:
        """Run one of MPI's collectives, such as "Allreduce". `nbytes` is the same on every rank."""
        # See Note [Presync]: all ranks have come, so the blocking form ends soon.
        if self._on_device or (BLOCKS_WELL and nbytes >= PRESYNC_MIN_BYTES):
            with mpi_errors():
                getattr(self._communicator, name)(*arguments)
            return
        start = self._starters.get(name) or self._starter(name)
        # After a presync all ranks have come, and the wait is only for the library's own steps.
        longest_nap_s = NO_NAP_S if nbytes >= PRESYNC_MIN_BYTES else ARRIVAL_NAP_S
        self._messages.run(call, lambda: start(*arguments), longest_nap_s=longest_nap_s)

    def _starter(self, name: str) -> Callable[..., MPI.Request]:
        start: Callable[..., MPI.Request] = getattr(self._communicator, f"I{name.lower()}")
        return self._starters.setdefault(name, start)


class MPIPlan(LibraryPlan):
    """Runs a collective of an `MPITransport`. Before a large collective, the ranks wait for one another: see Note [Presync]."""

    def __init__(self, transport: MPITransport, signature: Signature, size: int) -> None:
        super().__init__(transport, signature)
        self._mpi = transport
        self._nbytes = whole_bytes(signature, size)

    @property
    def algorithm(self) -> str:
        """The name "ring", or "MPI" if the MPI library chooses the algorithm."""
        return "ring" if self._mpi.takes_ring(self._signature) else "MPI"

    def run(self, part: torch.Tensor, whole: torch.Tensor | None, call: Call) -> None:
        """See `Plan.run`."""
        self._mpi.presync(self._nbytes, call)
        super().run(part, whole, call)


def whole_bytes(signature: Signature, size: int) -> int:
    """Return the size of a call's larger tensor, in bytes. Return 0 if this size may differ between ranks."""
    # Each rank may have different splits, so no rank knows the sizes of the other ranks.
    if signature.splits is not None:
        return 0
    return signature.nbytes * (1 if signature.name in ONE_TENSOR else size)


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if tensor.nbytes <= PIECE_BYTES:
        return (tensor,)
    return torch.split(tensor, PIECE_BYTES // tensor.element_size())


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts[:-1])]
