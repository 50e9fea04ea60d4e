"""Connect the processes of an MPI job. Import this module only if an MPI library can be loaded."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mpi4py import MPI

from ...engine.device import DeviceRuntime
from ...engine.group import HostGroup
from ...engine.transport import Transport
from ...errors import BackendUnavailableError, InvalidArgumentError, LaunchError
from ...health.connecting import Connecting
from ...health.liveness import Liveness
from ...membership.shrinkable_group import ShrinkableGroup
from ...startup.backend import ConnectRequest
from ...startup.mpi_library import other_mpi
from ...startup.settings import AlgorithmThresholds
from ..cuda import cuda_runtime
from ..cuda_awareness import CudaAwareness, try_cuda_awareness
from ..device import DeviceTransport
from .fault_tolerance import revoked_on_failure
from .first_meeting import meet
from .job_abort import ExitBarrier, abort_on_uncaught
from .library import library_name
from .node.node_transport import NodeTransport
from .reconnector import MPIReconnector
from .ring_all_reduce import largest_piece_bytes
from .transport import MPITransport
from .waiting import spin_for


def connect(request: ConnectRequest, connecting: Connecting) -> HostGroup:
    """Make a group over a duplicate of MPI_COMM_WORLD, or of the request's communicator. MPI must have started already."""
    abort_on_uncaught()
    spin_for(request.spin_s)
    job = MPI.COMM_WORLD if request.communicator is None else _checked(request.communicator)
    _check_threads()
    _check_sizes(request, job.Get_rank(), job.Get_size())
    connecting.set_place(job.Get_rank(), job.Get_size())
    meet(job, connecting)
    with connecting.step("connecting: all ranks have come, but one has stopped, failed or ended since"):
        return _connect(request, job, connecting)


def _connect(request: ConnectRequest, job: MPI.Intracomm, connecting: Connecting) -> HostGroup:
    exit_barrier = ExitBarrier.of(job)
    connecting.liveness = exit_barrier.liveness
    device = cuda_runtime() if request.wants("cuda") else None
    # Rank 0's values hold on all ranks: with different thresholds, ranks would choose different algorithms.
    thresholds, piece_bytes = job.bcast((request.thresholds, largest_piece_bytes()))
    connect = functools.partial(_transport, request, thresholds, piece_bytes, device, exit_barrier.liveness)
    reconnector = MPIReconnector(job.Dup(), connect, exit_barrier.leavers, request.group_name)
    group = ShrinkableGroup(
        reconnector.transport,
        reconnector,
        name=request.group_name,
        timeout_s=request.timeout_s,
        device=device,
        check_calls=request.check_calls,
    )
    group.start({"check_calls": request.check_calls, "reproducible": request.reproducible}, request.stall_warning_s)
    return group


def _transport(
    request: ConnectRequest,
    thresholds: AlgorithmThresholds | None,
    piece_bytes: int,
    device: DeviceRuntime | None,
    liveness: Liveness,
    communicator: MPI.Intracomm,
    members: Sequence[int],
) -> Transport:
    """Connect the ranks of a communicator. All its ranks call this function. `members` are their ranks in the job."""
    rank = communicator.Get_rank()
    duplicate = communicator.Dup()
    with revoked_on_failure(duplicate):
        transport: Transport = NodeTransport(
            duplicate, reproducible=request.reproducible, thresholds=thresholds, piece_bytes=piece_bytes
        )
    direct = None
    if _all_are_cuda_aware(device, communicator):
        # CUDA memory has a separate transport, because MPI's collectives on it must block. See Note [Presync] in `transport`.
        duplicate = communicator.Dup()
        with revoked_on_failure(duplicate):
            direct = MPITransport(duplicate, reproducible=request.reproducible, on_device=True)
    if device is not None:
        transport = DeviceTransport(transport, rank, device, direct)
    transport.liveness = liveness.part(members, rank, transport.lost_ranks)
    return transport


def _all_are_cuda_aware(device: DeviceRuntime | None, communicator: MPI.Intracomm) -> bool:
    """Whether MPI takes CUDA memory on every rank. Every rank of the communicator calls this."""
    # A rank without CUDA takes part in the reduction, too, because the other ranks wait for it.
    is_aware = device is not None and _cuda_awareness().is_aware
    return bool(communicator.allreduce(is_aware, MPI.LAND))


@functools.cache
def _cuda_awareness() -> CudaAwareness:
    return try_cuda_awareness()


def _checked(communicator: object) -> MPI.Intracomm:
    """Return the user's communicator if it has the right type. `launch_by` has checked that this rank is in it."""
    if not isinstance(communicator, MPI.Intracomm):
        raise InvalidArgumentError(
            f"communicator={communicator!r}: expected an intra-communicator of mpi4py, such as MPI.COMM_WORLD.Split(color)"
        )
    return communicator


def _check_threads() -> None:
    # The group's queue, the monitor and the caller call MPI at the same time.
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise BackendUnavailableError(
            f"backend 'mpi' needs an MPI started with MPI_THREAD_MULTIPLE, but {library_name()} was started with a lower "
            "level. Do not lower mpi4py.rc.thread_level, do not initialise MPI before Syncline, or use another MPI build"
        )


def _check_sizes(request: ConnectRequest, rank: int, size: int) -> None:
    launch = request.launch
    # If the launcher does not start MPI programs (such as torchrun), each process is rank 0 of a separate MPI world.
    if launch is not None and not launch.is_mpi and launch.least_world_size() > size:
        raise LaunchError(
            f"backend 'mpi' was asked for, but {launch.launcher} started these {launch.least_world_size()} ranks and does not "
            "start MPI programs. Start them with mpiexec or srun, or choose backend 'gloo' (unset SYNCLINE_BACKEND)"
        )
    # If the launcher started another number of ranks than this MPI sees, the launcher belongs to another MPI.
    if launch is not None and (launch.least_world_size() > size or launch.world_size not in (None, size)):
        raise LaunchError(other_mpi(launch.launcher, launch.least_world_size(), library_name(), size))
    if request.world_size is not None and request.world_size != size:
        raise LaunchError(
            f"world_size={request.world_size} was asked for, but {library_name()} started {size} rank(s); leave world_size "
            f"out, or start {request.world_size} ranks"
        )
    if request.rank is not None and request.rank != rank:
        raise LaunchError(
            f"rank={request.rank} was asked for, but {library_name()} says that this is rank {rank}; leave rank out"
        )
