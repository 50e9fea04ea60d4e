"""Connecting the ranks of an MPI job, and what can be wrong before that."""

from __future__ import annotations

import faulthandler
import functools
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...devices import DeviceDispatchTransport, DeviceRuntime
from ...devices.cuda import cuda_runtime
from ...devices.cuda_awareness import CudaAwareness, try_cuda_awareness
from ...errors import BackendUnavailableError, LaunchError
from ...failures.liveness import Liveness
from ...host.host_group import HostGroup
from ...host.transport import Transport
from ...startup.algorithm_thresholds import AlgorithmThresholds
from ...startup.backend import Backend, ConnectRequest
from ...startup.launch import detect_launch
from ...startup.srun import srun_hint
from ...startup.srun_check import srun_problem
from ...survivors.shrinkable_group import ShrinkableGroup

if TYPE_CHECKING:
    from mpi4py import MPI

    from .job_abort import ExitBarrier

_START_S = 300.0

_NO_MPI4PY = (
    "mpi4py is not installed; on a cluster that has an MPI, load its module and run `pip install 'syncline-collectives[mpi]'`; "
    "elsewhere `pip install 'syncline-collectives[mpich]'` brings an MPI along"
)
_NO_LIBRARY = (
    "mpi4py finds no MPI library; on a cluster, load the site's module first (such as `module load openmpi`) or set "
    "MPI4PY_LIBMPI to its libmpi.so; elsewhere `pip install 'syncline-collectives[mpich]'` brings one along"
)


class MPIBackend(Backend):
    """Ranks are the processes of MPI_COMM_WORLD."""

    def missing(self) -> str | None:
        """Whether mpi4py is there and finds an MPI library, which it must load to know."""
        if find_spec("mpi4py") is None:
            return _NO_MPI4PY
        return srun_problem() or _library_problem()

    def connect(self, request: ConnectRequest) -> HostGroup:
        """Start MPI if nobody has, and make a group of a duplicate of MPI_COMM_WORLD."""
        lack = self.missing()
        if lack is not None:
            kind = BackendUnavailableError if srun_problem() is None else LaunchError
            raise kind(f"backend 'mpi': {lack}")
        _check_init_method(request)
        from mpi4py import MPI

        from .job_abort import abort_on_uncaught
        from .reunion import MPIReunion

        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        abort_on_uncaught()
        world = MPI.COMM_WORLD
        _check_threads()
        _check_sizes(request, world.Get_rank(), world.Get_size())
        exit_barrier = _exit_barrier()
        device = cuda_runtime() if request.wants("cuda") else None
        connect = functools.partial(_transport, request, world.bcast(request.thresholds), device, exit_barrier.liveness)
        reunion = MPIReunion(world.Dup(), connect, exit_barrier.departures, request.group_name)
        group = ShrinkableGroup(
            reunion.transport,
            reunion,
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
    device: DeviceRuntime | None,
    liveness: Liveness,
    communicator: MPI.Intracomm,
    members: Sequence[int],
) -> Transport:
    """Connect the ranks of a communicator, which are `members` in MPI_COMM_WORLD. A collective of it."""
    from .fault_tolerance import revoked_on_failure
    from .node.node_transport import NodeTransport
    from .transport import MPITransport

    rank = communicator.Get_rank()
    duplicate = communicator.Dup()
    with revoked_on_failure(duplicate):
        transport: Transport = NodeTransport(duplicate, reproducible=request.reproducible, thresholds=thresholds)
    direct = None
    if _all_are_cuda_aware(device, communicator):
        duplicate = communicator.Dup()
        with revoked_on_failure(duplicate):
            direct = MPITransport(duplicate, reproducible=request.reproducible, on_device=True)
    if device is not None:
        transport = DeviceDispatchTransport(transport, rank, device, direct)
    transport.liveness = liveness.part(members, rank, transport.lost_ranks)
    return transport


def _all_are_cuda_aware(device: DeviceRuntime | None, communicator: MPI.Intracomm) -> bool:
    """Whether every rank has CUDA devices whose memory MPI can be given. A collective of the communicator."""
    from mpi4py import MPI

    is_aware = device is not None and _cuda_awareness().is_aware
    return bool(communicator.allreduce(is_aware, MPI.LAND))


@functools.cache
def _cuda_awareness() -> CudaAwareness:
    return try_cuda_awareness()


@functools.cache
def _library_problem() -> str | None:
    """Why mpi4py cannot load an MPI library, or None. Loading it starts MPI, unless the caller has told mpi4py not to."""
    try:
        _start_mpi_together_with_all_ranks()
    except (ImportError, RuntimeError) as error:
        return f"{_NO_LIBRARY} (the loader said: {' '.join(str(error).split())})"
    return None


def _start_mpi_together_with_all_ranks() -> None:
    """Import mpi4py.MPI, which waits for all ranks of the job.

    A rank that died before it came here would be waited for without end (MPICH's mpiexec does not end the job), and no Python
    code runs meanwhile. So after `_START_S` seconds faulthandler prints this stack, whose names say what it waits for, and ends
    this process, which ends the job.
    """
    waits_for_others = _was_launched()
    if waits_for_others:
        faulthandler.dump_traceback_later(_START_S, exit=True)
    try:
        import mpi4py.MPI  # noqa: F401
    finally:
        if waits_for_others:
            faulthandler.cancel_dump_traceback_later()


def _was_launched() -> bool:
    try:
        return detect_launch(os.environ) is not None
    except LaunchError:  # a launcher or two; `connect` is never reached then
        return True


def _check_threads() -> None:
    from mpi4py import MPI

    from .library import library_name

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise BackendUnavailableError(
            f"backend 'mpi' needs an MPI started with MPI_THREAD_MULTIPLE, but {library_name()} was started with a lower "
            "level. Do not lower mpi4py.rc.thread_level, do not initialise MPI before Syncline, or use another MPI build"
        )


def _check_init_method(request: ConnectRequest) -> None:
    if request.init_method not in (None, "mpi://", "env://"):
        raise LaunchError(
            f"init_method {request.init_method!r} says where the ranks meet, but the ranks of backend 'mpi' were connected by "
            "their launcher; leave init_method out, or choose backend 'gloo'"
        )
    if request.store is not None:
        raise LaunchError("a store was given, but the ranks of backend 'mpi' need none; leave it out, or choose backend 'gloo'")


def _check_sizes(request: ConnectRequest, rank: int, size: int) -> None:
    from .library import library_name

    launch = request.launch
    if launch is not None and not launch.is_mpi and launch.least_world_size() > size:
        raise LaunchError(
            f"backend 'mpi' was asked for, but {launch.launcher} started these {launch.least_world_size()} ranks and does not "
            "start MPI programs. Start them with mpiexec or srun, or choose backend 'gloo' (unset SYNCLINE_BACKEND)"
        )
    if launch is not None and launch.world_size not in (None, size):
        raise LaunchError(
            f"{launch.launcher} started {launch.world_size} rank(s), but {library_name()} sees {size}: the launcher and the "
            "library belong to different MPIs. Use that library's mpiexec, or set MPI4PY_LIBMPI to the launcher's libmpi.so"
            f"{srun_hint(launch.launcher)}"
        )
    if request.world_size is not None and request.world_size != size:
        raise LaunchError(
            f"world_size={request.world_size} was asked for, but {library_name()} started {size} rank(s); leave world_size "
            f"out, or start {request.world_size} ranks"
        )
    if request.rank is not None and request.rank != rank:
        raise LaunchError(
            f"rank={request.rank} was asked for, but {library_name()} says that this is rank {rank}; leave rank out"
        )


@functools.cache
def _exit_barrier() -> ExitBarrier:
    from .job_abort import ExitBarrier

    return ExitBarrier()


backend = MPIBackend()
