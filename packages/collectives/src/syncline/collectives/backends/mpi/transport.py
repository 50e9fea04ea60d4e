"""The blocking collectives over one MPI communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from mpi4py import MPI

from ...deadline import Deadline
from ...errors import TransportError
from ...process_group import Collective
from ...reduce_op import ReduceOp
from ...reduction import reduce_in_rank_order
from ...transport import Transport
from .datatypes import REDUCIBLE, memory, mpi_op
from .waiting import wait


class MPITransport(Transport):
    """Non-blocking MPI collectives, waited for with a deadline.

    Cost, for n bytes and p ranks: `all_reduce`, `broadcast` and `all_gather` are the MPI library's own. `all_reduce` of
    float16 and bfloat16 is an all-to-all and an all-gather of bytes with an addition in float32 between them: 2 n (p-1)/p
    bytes on the wire from each rank, as a ring has, and 2 n of extra memory.
    """

    backend_name = "mpi"

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator
        self._size = communicator.Get_size()
        self._abandoned: list[object] = []

    def describe(self) -> str:
        """The MPI library's name and version."""
        return f"mpi: {library_name()}"

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, call: Collective, deadline: Deadline) -> None:  # noqa: ARG002
        """Reduce with MPI, or, where MPI has no such type, by moving bytes and reducing here."""
        if tensor.dtype not in REDUCIBLE:
            self._all_reduce_bytes(tensor, op, deadline)
            return
        spec = (memory(tensor), tensor.numel(), REDUCIBLE[tensor.dtype])
        self._run(lambda: self._communicator.Iallreduce(MPI.IN_PLACE, spec, mpi_op(op, tensor.dtype)), deadline)
        if op is ReduceOp.AVG:
            tensor.div_(self._size)

    def broadcast(self, tensor: torch.Tensor, root: int, call: Collective, deadline: Deadline) -> None:  # noqa: ARG002
        """Copy bytes."""
        self._run(lambda: self._communicator.Ibcast((memory(tensor), MPI.BYTE), root), deadline)

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        call: Collective,  # noqa: ARG002
        deadline: Deadline,
    ) -> None:
        """Gather bytes into one block and copy it out."""
        block = torch.empty((self._size, tensor.numel()), dtype=tensor.dtype)
        self._run(
            lambda: self._communicator.Iallgather((memory(tensor), MPI.BYTE), (memory(block), MPI.BYTE)),
            deadline,
        )
        for output, row in zip(outputs, block, strict=True):
            output.copy_(row.view(tensor.shape))

    def barrier(self, call: Collective, deadline: Deadline) -> None:  # noqa: ARG002
        """MPI's barrier."""
        self._run(self._communicator.Ibarrier, deadline)

    def close(self) -> None:
        """Free the communicator; all ranks do."""
        self._communicator.Free()

    def abort(self) -> None:
        """MPI has no way to wake the other ranks short of ending the job, which is not ours to decide: do nothing."""

    def _all_reduce_bytes(self, tensor: torch.Tensor, op: ReduceOp, deadline: Deadline) -> None:
        """Each rank gets slice r of all ranks, reduces it in rank order, and gives the result to all."""
        flat = tensor.view(-1)
        itemsize = flat.element_size()
        slices = flat.tensor_split(self._size)
        counts = [piece.numel() * itemsize for piece in slices]
        starts = [sum(counts[:r]) for r in range(self._size)]
        mine = slices[self._communicator.Get_rank()]
        terms = torch.empty((self._size, mine.numel()), dtype=flat.dtype)
        row = mine.numel() * itemsize
        self._run(
            lambda: self._communicator.Ialltoallv(
                (memory(flat), (counts, starts), MPI.BYTE),
                (memory(terms), ([row] * self._size, [row * r for r in range(self._size)]), MPI.BYTE),
            ),
            deadline,
        )
        mine.copy_(reduce_in_rank_order(op, list(terms)))
        self._run(lambda: self._communicator.Iallgatherv(MPI.IN_PLACE, (memory(flat), (counts, starts), MPI.BYTE)), deadline)

    def _run(self, start: Callable[[], MPI.Request], deadline: Deadline) -> None:
        with _mpi_errors():
            request = start()
            try:
                wait(request, deadline)
            except TimeoutError:
                # MPI may still write to the tensors, which `start` refers to: they must outlive the request.
                self._abandoned.append((request, start))
                raise


@contextmanager
def _mpi_errors() -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        raise TransportError(f"{library_name()} reported: {error.Get_error_string()}") from error


def library_name() -> str:
    """The MPI library in a few words: "MPICH 5.0.2", "Open MPI 5.0.11"."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"
