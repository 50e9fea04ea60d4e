"""Connect the processes of an MPI job. You can import this module only if there is an MPI library."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

from mpi4py import MPI

from ...engine.device import DeviceRuntime
from ...engine.host_group import HostGroup
from ...engine.transport import Transport
from ...errors import BackendUnavailableError, CollectiveTimeout, DisagreementError, InvalidArgumentError, LaunchError
from ...health.connecting import Connecting, speakers
from ...health.liveness import Liveness
from ...health.statements import Statements, ranks_in_words
from ...membership.shrinkable_group import ShrinkableGroup
from ...startup.backend import ConnectRequest
from ...startup.mpi_library import CudaAwareness, other_mpi, try_cuda_awareness
from ...startup.settings import AlgorithmThresholds
from ...version import __version__
from ..cuda import cuda_runtime
from ..device import DeviceTransport
from .job_abort import ExitBarrier, abort_on_uncaught
from .library import library_name, revoked_on_failure
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
    """Make a transport over a communicator, whose ranks all call this. `members`: for each rank, its rank in the job."""
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
    # A rank without CUDA takes part in the reduction, too, because the other ranks wait for it.
    is_aware = device is not None and _cuda_awareness().is_aware
    return bool(communicator.allreduce(is_aware, MPI.LAND))


@functools.cache
def _cuda_awareness() -> CudaAwareness:
    return try_cuda_awareness()


def _checked(communicator: object) -> MPI.Intracomm:
    if not isinstance(communicator, MPI.Intracomm):
        raise InvalidArgumentError(
            f"communicator={communicator!r}: expected an intra-communicator of mpi4py, such as MPI.COMM_WORLD.Split(color)"
        )
    return communicator


def _check_threads() -> None:
    # The threads of the group's queue, of the monitor and of the caller may call MPI at the same time.
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


_HELLO_BYTES = 64
_LONGEST_PAUSE_S = 0.01
# After a time-out, ranks that are no listeners (see Note [The first meeting]) raise their error this much later than the
# listeners. The first error may end the job, so the first error should name the missing ranks.
_LISTENERS_FIRST_S = 2.0
_BLOCK_RANKS = 64


def meet(communicator: MPI.Intracomm, connecting: Connecting, version: str = __version__) -> None:
    """Return when all ranks of the communicator have called this function, with the same version of Syncline.

    Raises:
        CollectiveTimeout: some ranks did not come in time. The message says what this rank knows about the missing ranks; see
            Note [The first meeting].
        DisagreementError: the ranks run different versions. All ranks raise this error.
    """
    meeting = next((one for one in _unfinished if one.communicator == communicator), None)
    # Only the first call makes a meeting. After a time-out, a second call goes on with the requests of the first call.
    if meeting is None:
        meeting = _Meeting(communicator, version)
        _unfinished.append(meeting)
    with connecting.step("the first meeting of all ranks: not all have called init_process_group"):
        meeting.wait(connecting)
    _unfinished.remove(meeting)
    said = meeting.versions()
    # Each rank has all versions, so all ranks raise the same error.
    if len(set(said)) > 1:
        raise DisagreementError(
            f"the ranks run different versions of Syncline: {Statements.of(said).in_words()}. Install the same on every node"
        )


def blocks(size: int) -> list[range]:
    """Divide the ranks into blocks of at most 64 ranks, for the steps in Note [The first meeting]."""
    return [range(start, min(start + _BLOCK_RANKS, size)) for start in range(0, size, _BLOCK_RANKS)]


class _Meeting:
    """One meeting of all ranks of a communicator.

    Note [The first meeting]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    The communicator belongs to the user. If the user receives from any rank with any tag, this receive could take a message of
    Syncline. So Syncline uses only collectives on this communicator. The collectives are non-blocking, because a rank may never
    come::

        1. each rank sends one byte to the listeners of its block of 64 ranks (Igatherv): bytes that have arrived show who is
           here
        2. all ranks tell each other their version of Syncline (Iallgather)
        3. each rank tests its requests until all are complete, or the time limit is reached
        4. all ranks compare the versions; before this step, no rank sends a message that another version might not understand

    Because of the blocks, no rank needs a connection to all other ranks. The listeners of a block are its first, middle and
    last rank, because a listener may be the rank that does not come.

    Never change this protocol: ranks with different versions use it to find out that their versions differ.
    """

    def __init__(self, communicator: MPI.Intracomm, version: str) -> None:
        self.communicator = communicator
        self._rank, size = communicator.Get_rank(), communicator.Get_size()
        # MPI reads and writes these buffers as long as the requests exist, so they live in this object.
        self._mine, self._nothing = b"\1", b""
        self._here = bytearray(_BLOCK_RANKS)
        self._hello = version.encode()[:_HELLO_BYTES].ljust(_HELLO_BYTES, b"\0")
        self._hellos = bytearray(size * _HELLO_BYTES)
        self._requests: list[MPI.Request] = []
        for block in blocks(size):
            if self._rank in block:
                self._block, self._listeners = block, [block[place] for place in speakers(len(block))]
            for place in speakers(len(block)):
                self._requests.append(self._say_here(block, block[place], size))
        self._requests.append(communicator.Iallgather([self._hello, MPI.BYTE], [self._hellos, MPI.BYTE]))

    def _say_here(self, block: range, listener: int, size: int) -> MPI.Request:
        """Start to send one byte from each rank of a block to a listener. All ranks of the communicator call this method."""
        landing = None
        if listener == self._rank:
            counts = [int(rank in block) for rank in range(size)]
            landing = [self._here, (counts, [max(0, rank - block[0]) * count for rank, count in enumerate(counts)]), MPI.BYTE]
        mine = self._mine if self._rank in block else self._nothing
        return self.communicator.Igatherv([mine, MPI.BYTE], landing, listener)

    def wait(self, connecting: Connecting) -> None:
        scope, pause_s, over_s = connecting.scope, 1e-5, None
        while not MPI.Request.Testall(self._requests):
            absent = self._absent()
            connecting.say_who_is_missing(self._in_words(absent), speaks=self._is_first_of(absent))
            try:
                scope.check()
            except TimeoutError:
                over_s = over_s or time.monotonic()
                # A listener that knows which ranks are missing raises at once. All other ranks wait two
                # seconds longer, so that the listener's error comes first.
                if absent or time.monotonic() - over_s > _LISTENERS_FIRST_S:
                    raise CollectiveTimeout(self._timed_out(scope.timeout_s)) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def versions(self) -> list[str]:
        whole = bytes(self._hellos)
        pieces = (whole[start : start + _HELLO_BYTES] for start in range(0, len(whole), _HELLO_BYTES))
        return [piece.rstrip(b"\0").decode(errors="replace") for piece in pieces]

    def _absent(self) -> list[int]:
        # Only listeners have memory in which the bytes of the others arrive.
        if self._rank not in self._listeners:
            return []
        # This rank's own byte may not have arrived, but the rank is certainly here.
        return [rank for rank in self._block if not self._here[rank - self._block[0]] and rank != self._rank]

    def _is_first_of(self, absent: list[int]) -> bool:
        """Return whether this rank is the lowest among the listeners that have come. Only the lowest listener logs."""
        return bool(absent) and self._rank == min(rank for rank in self._listeners if rank not in absent)

    def _in_words(self, absent: list[int]) -> str:
        if absent:
            return f"{ranks_in_words(absent)} did not"
        if self._rank not in self._listeners:
            return f"the output of {ranks_in_words(self._listeners)} names the missing ranks, unless these are missing, too"
        # If the block is the whole job, all ranks have come. Then only another version's protocol can keep the requests open.
        if len(self._block) == self.communicator.Get_size():
            return "all have come, but one runs another version of Syncline"
        return f"{ranks_in_words(self._block)} came; the output of other ranks names the missing ranks"

    def _timed_out(self, timeout_s: float) -> str:
        return (
            f"not all ranks called init_process_group within {timeout_s:g} s (timeout): {self._in_words(self._absent())}\n"
            "- Every rank of the MPI job must call init_process_group. If only some of the ranks should train, pass an mpi4py "
            "communicator of these ranks: init_process_group(communicator=...).\n"
            "- If a rank still loads data or compiles, pass a longer timeout.\n"
            "- A missing rank may have ended, may hang, or may run an older version of Syncline"
        )


_unfinished: list[_Meeting] = []
