"""The subjects of a measurement: backends and baselines."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...errors import InvalidArgumentError
from ...group import ProcessGroup
from ...startup.backend import ConnectRequest
from ...startup.launch import detect_launch
from ...startup.mpi_library import start_mpi
from ...startup.registry import backend_names, load_backend
from .kinds import ROOT, Allocate, Buffers

if TYPE_CHECKING:
    from mpi4py import MPI

Call = Callable[[], object]

RAW_MPI = "raw-mpi"
TORCH_GLOO = "torch-gloo"
FLOOR = "floor"
IN_WINDOW = "-in-window"


class Subject(ABC):
    """Something that the bench can measure, such as a backend.

    Attributes:
        name: the subject's name on the command line.
        communicates: whether the subject computes the collective's result. If not, the bench checks no result.
    """

    name: str
    communicates = True

    def allocate(self) -> Allocate | None:
        """Return the function that allocates `Buffers.block` for this subject; None if the subject uses the shared block."""
        return None

    @abstractmethod
    def prepare(self, collective: str, buffers: Buffers) -> Call:
        """Return a function that runs the collective once, until the collective is complete. The function does no other work.

        Raises:
            NotImplementedError: on every rank, if this subject cannot run the collective with this dtype and device.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections that only the bench uses."""


class GroupSubject(Subject):
    """Runs the collectives of a process group of Syncline.

    Args:
        group: the group to measure.
        owned: whether `close` closes the group.
    """

    def __init__(self, group: ProcessGroup, *, owned: bool) -> None:
        self.name = group.backend_name
        self._group = group
        self._owned = owned

    def prepare(self, collective: str, buffers: Buffers) -> Call:
        """Return a function that calls the group's method for this collective."""
        g, b = self._group, buffers
        on_root = b.parts(b.block) if b.rank == ROOT else None
        return {
            "all_reduce": lambda: g.all_reduce(b.block),
            "reduce": lambda: g.reduce(b.block, ROOT),
            "broadcast": lambda: g.broadcast(b.block, ROOT),
            "all_gather": lambda: g.all_gather_into_tensor(b.block, b.part),
            "reduce_scatter": lambda: g.reduce_scatter_tensor(b.part, b.block),
            "all_to_all": lambda: g.all_to_all_single(b.output, b.block),
            "gather": lambda: g.gather(b.part, on_root, ROOT),
            "scatter": lambda: g.scatter(b.part, on_root, ROOT),
            "send_recv": lambda: _wait_for(
                g.send(b.block, b.next_rank, async_op=True), g.recv(b.output, b.previous_rank, async_op=True)
            ),
            "barrier": g.barrier,
        }[collective]

    def close(self) -> None:
        """Close the group, if the bench has made it."""
        if self._owned:
            self._group.close()


class InWindowSubject(GroupSubject):
    """Like `GroupSubject`, but `Buffers.block` is memory that the group allocates (see `ProcessGroup.allocate`)."""

    def __init__(self, group: ProcessGroup, *, owned: bool) -> None:
        super().__init__(group, owned=owned)
        self.name += IN_WINDOW

    def allocate(self) -> Allocate:
        """Return the group's own allocator."""
        return self._group.allocate


class RawMPI(Subject):
    """Runs blocking calls of mpi4py, as a program without Syncline would do."""

    name = RAW_MPI

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator

    def prepare(self, collective: str, buffers: Buffers) -> Call:
        """Return a function that makes the blocking call. Its arguments are made here, so that they take no measured time."""
        from mpi4py import MPI

        from ...transports.mpi.library import REDUCIBLE, memory

        if buffers.block.device.type != "cpu":
            raise NotImplementedError(f"mpi4py is measured on the host's memory, not on {buffers.block.device}")
        reduces = "reduce" in collective
        datatype = REDUCIBLE.get(buffers.block.dtype) if reduces else MPI.BYTE
        if datatype is None:
            raise NotImplementedError(f"MPI has no portable datatype to reduce {buffers.block.dtype}")

        def spec(tensor: torch.Tensor) -> Any:
            return (memory(tensor), datatype)

        comm, is_root = self._communicator, buffers.rank == ROOT
        block, part, output = spec(buffers.block), spec(buffers.part), spec(buffers.output)
        on_root = block if is_root else None
        reduce_sides: Any = (MPI.IN_PLACE, block) if is_root else (block, None)
        calls: dict[str, Call] = {
            "all_reduce": functools.partial(comm.Allreduce, MPI.IN_PLACE, block),
            "reduce": functools.partial(comm.Reduce, reduce_sides[0], reduce_sides[1], MPI.SUM, ROOT),
            "broadcast": functools.partial(comm.Bcast, block, ROOT),
            "all_gather": functools.partial(comm.Allgather, part, block),
            "reduce_scatter": functools.partial(comm.Reduce_scatter_block, block, part),
            "all_to_all": functools.partial(comm.Alltoall, block, output),
            "gather": functools.partial(comm.Gather, part, on_root, ROOT),
            "scatter": functools.partial(comm.Scatter, on_root, part, ROOT),
            "send_recv": lambda: comm.Sendrecv(block, buffers.next_rank, 0, output, buffers.previous_rank, 0),
            "barrier": comm.Barrier,
        }
        return calls[collective]

    def close(self) -> None:
        """Free the communicator."""
        self._communicator.Free()


class TorchGloo(Subject):
    """Runs the collectives of torch's own Gloo group."""

    name = TORCH_GLOO

    def __init__(self, group: Any) -> None:
        self._group = group

    def prepare(self, collective: str, buffers: Buffers) -> Call:
        """Return a function that calls the group's method and waits for the result."""
        g, b = self._group, buffers
        rows = b.parts(b.block)
        calls: dict[str, Call] = {
            "all_reduce": lambda: g.allreduce([b.block]).wait(),
            "reduce": lambda: g.reduce(b.block, ROOT, dist.ReduceOp.SUM).wait(),
            "broadcast": lambda: g.broadcast(b.block, ROOT).wait(),
            "all_gather": lambda: g.allgather([rows], [b.part]).wait(),
            "reduce_scatter": lambda: g._reduce_scatter_base(b.part, b.block, dist.ReduceScatterOptions()).wait(),
            "all_to_all": lambda: g.alltoall_base(b.output, b.block, [], []).wait(),
            "gather": lambda: g.gather([rows] if b.rank == ROOT else [], [b.part], _rooted(dist.GatherOptions())).wait(),
            "scatter": lambda: g.scatter([b.part], [rows] if b.rank == ROOT else [], _rooted(dist.ScatterOptions())).wait(),
            "send_recv": lambda: _wait_for(g.send([b.block], b.next_rank, 0), g.recv([b.output], b.previous_rank, 0)),
            "barrier": lambda: g.barrier().wait(),
        }
        return calls[collective]

    def close(self) -> None:
        """Drop the reference to the group."""
        del self._group


class Floor(Subject):
    """A lower bound for the time of an `all_reduce`: the additions and copies that one rank must do, in its own memory."""

    name = FLOOR
    communicates = False

    def prepare(self, collective: str, buffers: Buffers) -> Call:
        """Return a function that does one rank's additions and copies of an `all_reduce`."""
        if collective != "all_reduce":
            raise NotImplementedError("it is that of all_reduce")
        share = buffers.block.numel() // buffers.size
        own = buffers.block[:share]
        others = [buffers.output[other * share : (other + 1) * share] for other in range(1, buffers.size)]

        def call() -> None:
            for other in others:
                own.add_(other)
            for other in others:
                other.copy_(own)

        return call

    def close(self) -> None:
        """Do nothing."""


def _wait_for(*works: Any) -> None:
    for work in works:
        work.wait()


def _rooted(options: Any) -> Any:
    options.rootRank = ROOT
    return options


def default_subjects(group: ProcessGroup) -> list[str]:
    """Return the names of what to measure if the command line names nothing: the group's backend, and the baselines."""
    raw = [RAW_MPI] if group.backend_name == "mpi" else []
    ours = [f"{group.backend_name}{IN_WINDOW}", group.backend_name] if raw else [group.backend_name]
    return [*ours, *raw, TORCH_GLOO, FLOOR] if group.size > 1 else [group.backend_name]


def connect_subject(name: str, control: ProcessGroup) -> Subject:
    """Make the subject with this name, and connect it to the other ranks. All ranks of `control` call this function.

    Raises:
        InvalidArgumentError: no backend or baseline has this name; "-in-window" follows the name of a baseline; or the baseline
            needs MPI, but MPI does not connect these ranks.
    """
    if name in _BASELINES:
        return _BASELINES[name](control)
    if name.removesuffix(IN_WINDOW) in _BASELINES:
        raise InvalidArgumentError(f"{name!r} cannot be measured: {name.removesuffix(IN_WINDOW)} takes plain memory only")
    kind = InWindowSubject if name.endswith(IN_WINDOW) else GroupSubject
    name = name.removesuffix(IN_WINDOW)
    if name == control.backend_name:
        return kind(control, owned=False)
    if name not in backend_names() and ":" not in name:
        known = ", ".join([*backend_names(), *_BASELINES])
        raise InvalidArgumentError(f"unknown backend {name!r} to measure; known are {known}")
    request = ConnectRequest(
        detect_launch(os.environ), None, None, None, timeout_s=control.timeout_s, group_name=f"bench-{name}"
    )
    return kind(load_backend(name).connect(request), owned=True)


_BASELINES: dict[str, Callable[[ProcessGroup], Subject]] = {
    RAW_MPI: lambda control: RawMPI(_mpi_world(control)),
    TORCH_GLOO: lambda control: TorchGloo(_torch_gloo(control)),
    FLOOR: lambda _: Floor(),
}


def _mpi_world(control: ProcessGroup) -> MPI.Intracomm:
    lack = load_backend("mpi").missing()
    if lack is None:
        start_mpi(control.timeout_s)
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_size() == control.size and MPI.COMM_WORLD.Get_rank() == control.rank:
            return MPI.COMM_WORLD.Dup()
        lack = f"MPI sees {MPI.COMM_WORLD.Get_size()} rank(s) here, {control.describe()} connects {control.size}"
    raise InvalidArgumentError(f"{RAW_MPI} cannot be measured: {lack}; start the bench with that MPI's mpiexec")


def _torch_gloo(control: ProcessGroup) -> Any:
    from ...startup.rendezvous import tcp_store_of_rank_0

    store = tcp_store_of_rank_0(control, control.timeout_s)
    prefixed = dist.PrefixStore("syncline/bench/torch-gloo", store)
    return dist.ProcessGroupGloo(prefixed, control.rank, control.size, timedelta(seconds=control.timeout_s))
