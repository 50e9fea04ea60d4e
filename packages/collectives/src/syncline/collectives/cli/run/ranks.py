"""Find this process's rank in its job, and set torchrun's variables."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

from ...engine.cancel_scope import CancelScope
from ...errors import LaunchError, SynclineError
from ...health.connecting import Connecting
from ...health.liveness import rank_here
from ...startup.addresses import (
    LOOPBACK,
    Doors,
    OwnAddress,
    addresses_for_others,
    agreed_addresses,
    chosen_interfaces,
    try_doors,
)
from ...startup.launch import RUN_ID_PREFIX, Launch, detect_launch, is_own_run_id, parent_rank
from ...startup.mpi_library import conflict_with_launcher, little_shared_memory, missing_library, other_mpi, start
from ...startup.settings import load_settings
from ...startup.uncaught_errors import say

if TYPE_CHECKING:
    from mpi4py import MPI

# The variables that torchrun sets, without those in `_CONSTANT`.
TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
_CONSTANT = {
    "ROLE_NAME": "default",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    # With torchrun, its agent serves the store and all ranks are clients. `syncline run` has no agent: if a script opens a
    # store itself, rank 0 must serve this store.
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}
# Without MPI the ranks cannot agree on a port, so each rank computes the port from the job's id, if MASTER_PORT is not set. The
# range is below the ports that the system hands out for connections.
_FIRST_PORT, _PORTS = 20000, 12000
_START_S = 300.0


@dataclass(frozen=True)
class Job:
    """The rank of this process, and the facts about its job.

    Attributes:
        node: the index of this node. Nodes are sorted by their lowest rank.
        nodes: the number of nodes.
        address, port: where rank 0 may listen. The port was free when it was chosen.
        run_id: a name of this run, the same on all ranks.
        carrier: the name of the launcher that gave this information; "nobody" without a launcher.
        world: an MPI communicator of all ranks, which only `syncline run` itself may use; None if MPI is not used.
        local_cores: for each rank of this node, the cores that the rank may use.
        without_mpi: the reason why MPI is not used; None if MPI is used.
        has_blocks: whether each node has consecutive ranks, as with torchrun.
        pid: the process id of this rank. A forked child has another process id, and is not a rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    address: str
    port: int
    run_id: str
    carrier: str
    world: MPI.Intracomm | None = None
    local_cores: Sequence[frozenset[int]] = ()
    without_mpi: str | None = None
    has_blocks: bool = True
    pid: int = field(default_factory=os.getpid)

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks. This call is a collective. Without MPI, return only this rank's value."""
        return [value] if self.world is None else self.world.allgather(value)

    def variables(self) -> dict[str, str]:
        """Return the environment variables that torchrun would set."""
        said = (
            self.rank,
            self.size,
            self.local_rank,
            self.local_size,
            self.node,
            self.nodes,
            self.rank,
            self.size,
            self.address,
            self.port,
            self.run_id,
        )
        return {**dict(zip(TORCHRUN, map(str, said), strict=True)), **_CONSTANT}

    def who(self) -> str:
        """Return a text that names this rank, its host and its process id."""
        return f"[syncline] {rank_here(self.rank, self.size, self.pid)}"


def find_job(environ: Mapping[str, str], wanted: int | None) -> Job | None:
    """Find this process's job. Return None if there is no launcher; then the caller must start `wanted` ranks.

    In an MPI job, this function starts MPI, and all ranks must call this function. `wanted` is the number that the user asked
    for (`-n`).

    Raises:
        LaunchError: two launchers were used, a rank of a job started this process, the `syncline run` that started this rank
            has ended, or the launcher and the MPI library belong to different MPIs.
    """
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id.startswith(started_id(os.getppid())):
        return _started_here(environ)
    parent = parent_rank(environ)
    if parent is not None:
        raise LaunchError(
            f"a rank of the job (pid {parent}) started this process, which is no rank itself.\n"
            "Start it with `python`; or outside of the job, with `mpirun -n N syncline run ...`"
        )
    if run_id.startswith(f"{RUN_ID_PREFIX}started-"):
        # Without this error, each such rank would start a job of its own.
        raise LaunchError(
            "the `syncline run` that started this rank has ended, so this rank ends, too (or TORCHELASTIC_RUN_ID is left over "
            "from an earlier job: unset it)"
        )
    if "TORCHELASTIC_RESTART_COUNT" in environ and run_id and not is_own_run_id(run_id):
        raise LaunchError(
            "torchrun started this process, and `syncline run` takes torchrun's place: two launchers at once.\n"
            "Leave one out: `mpirun -n N syncline run train.py`, or `torchrun --nproc-per-node N train.py`"
        )
    launch = detect_launch({name: value for name, value in environ.items() if name not in TORCHRUN})
    if launch is None:
        return _without_launcher(environ, wanted)
    if wanted is not None and launch.world_size not in (None, wanted):
        raise LaunchError(
            f"{launch.launcher} started {launch.world_size} rank(s), and `-n {wanted}` asks for others: two launchers at "
            f"once.\nLeave one out: `mpirun -n {wanted} syncline run train.py`, or `syncline run -n {wanted} train.py` alone"
        )
    return _launched(launch, environ)


def started_id(starter: int) -> str:
    """Return the beginning of the run id that the process `starter` gives to the ranks that it starts without MPI."""
    return f"{RUN_ID_PREFIX}started-{starter}-"


def set_variables(job: Job, environ: MutableMapping[str, str]) -> list[str]:
    """Set torchrun's variables. Return the variables that had another value before, such as "RANK=3 (now 0)"."""
    wanted = job.variables()
    stale = [name for name in TORCHRUN if environ.get(name, wanted[name]) != wanted[name]]
    told = [f"{name}={environ[name]} (now {wanted[name]})" for name in stale]
    environ.update(wanted)
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return told


def threads_for(local_cores: Sequence[frozenset[int]], local_rank: int, quota: float) -> int:
    """Return the number of threads for a rank: the rank's share of the cores or its share of the quota, whichever is smaller.

    Args:
        local_cores: for each rank of the node, the cores that this rank may use.
        local_rank: the rank's index in `local_cores`.
        quota: how many cores all ranks of the node together may keep busy.
    """
    share = sum(1 / sum(core in cores for cores in local_cores) for core in local_cores[local_rank])
    return max(1, int(min(share, quota / len(local_cores)) + 1e-9))


def cores_of_this_process() -> frozenset[int]:
    """Return the cores that this process may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def core_quota() -> float:
    """Return how many cores the container may keep busy; infinity if there is no limit."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            most, period = file.read().split()
        return float("inf") if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        return float("inf")


def _started_here(environ: Mapping[str, str]) -> Job:
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    return Job(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        node=0,
        nodes=1,
        address=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
        run_id=environ["TORCHELASTIC_RUN_ID"],
        carrier="syncline run",
        local_cores=[cores_of_this_process()] * size,
        without_mpi="`syncline run` found no mpiexec beside this Python and on PATH, or no mpi4py",
    )


def _without_launcher(environ: Mapping[str, str], wanted: int | None) -> Job | None:
    if wanted is not None and wanted > 1:
        return None
    by_hand = detect_launch(environ) if wanted is None else None
    if by_hand is not None and by_hand.least_world_size() > 1:
        return _without_mpi(by_hand, environ, "no MPI launcher started this process")
    return Job(
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        node=0,
        nodes=1,
        address="127.0.0.1",
        port=free_port(),
        run_id=f"{RUN_ID_PREFIX}alone-{secrets.token_hex(4)}",
        carrier="nobody",
        local_cores=[cores_of_this_process()],
        without_mpi="this process is alone",
    )


def _launched(launch: Launch, environ: Mapping[str, str]) -> Job:
    with suppress(ImportError):  # `missing_library` below reports that mpi4py is missing
        import mpi4py

        # Set this before the library is loaded. Otherwise mpi4py would also finalize MPI when a forked child of the script
        # ends, and so end the parent's MPI.
        mpi4py.rc.finalize = False
    problem = missing_library()
    if problem is not None:
        problem = problem.partition("\n")[0]
    else:
        problem = _start_mpi(launch)
    return _over_mpi(launch, environ) if problem is None else _without_mpi(launch, environ, problem)


def _start_mpi(launch: Launch) -> str | None:
    """Start MPI together with the other ranks.

    Returns:
        None if MPI connects the ranks. If srun started the ranks, but MPI does not connect them: the reason why. These ranks
            run without MPI.

    Raises:
        LaunchError: the launcher is not srun, and belongs to another MPI than the MPI library.
    """
    is_slurm = launch.launcher == "Slurm"
    conflict = conflict_with_launcher()
    if conflict is None:
        from mpi4py import MPI

        # Print this warning before MPI starts, because MPI may end the process. Print it once on each node.
        warning = little_shared_memory(MPI.get_vendor()[0], launch.local_world_size or 1) if launch.local_rank == 0 else None
        if warning is not None:
            say(f"syncline run: {warning}", sys.stderr)
        with Connecting(_START_S, 0) as connecting:
            connecting.set_place(launch.rank, launch.world_size)
            start(connecting)
        _let_the_script_start_mpi(MPI)
        found = MPI.COMM_WORLD.Get_size()
        if launch.world_size in (None, found):
            return None
        library = " ".join(MPI.Get_library_version().split(",")[0].split()[:3])
        conflict = other_mpi(launch.launcher, launch.world_size or 0, library, found)
    if not is_slurm:
        raise LaunchError(conflict)
    return conflict.partition("\n")[0]


def _let_the_script_start_mpi(mpi: Any) -> None:
    """Replace `MPI.Init` and `MPI.Finalize`, so that the script's calls of these functions do nothing.

    MPI has started already, and Syncline's groups may need it after the script's `Finalize`.
    """
    global _finalize
    _finalize = mpi.Finalize
    mpi.Init = mpi.Finalize = lambda: None
    mpi.Init_thread = lambda required=mpi.THREAD_MULTIPLE: mpi.Query_thread()  # noqa: ARG005 - mpi4py's name


def end_mpi() -> None:
    """End MPI in this process. If `syncline run` has replaced `MPI.Finalize`, call the original function."""
    from mpi4py import MPI

    (_finalize or MPI.Finalize)()


_finalize: Callable[[], None] | None = None


def _over_mpi(launch: Launch, environ: Mapping[str, str]) -> Job:
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    rank, size = world.Get_rank(), world.Get_size()
    node = world.Split_type(MPI.COMM_TYPE_SHARED, rank)
    first_here = node.bcast(rank)
    firsts = world.allgather(first_here)
    nodes = sorted(set(firsts))
    local_cores = node.allgather(cores_of_this_process())
    address, port = _agree_on_address(world, first_here == rank, len(nodes) > 1, environ)
    run_id = world.bcast(f"{RUN_ID_PREFIX}mpi-{secrets.token_hex(4)}")
    job = Job(
        rank=rank,
        size=size,
        local_rank=node.Get_rank(),
        local_size=node.Get_size(),
        node=nodes.index(first_here),
        nodes=len(nodes),
        address=address,
        port=port,
        run_id=run_id,
        carrier=launch.launcher,
        world=world,
        local_cores=local_cores,
        has_blocks=firsts == sorted(firsts),
    )
    node.Free()
    return job


def _without_mpi(launch: Launch, environ: Mapping[str, str], problem: str) -> Job:
    size = launch.least_world_size()
    if launch.launcher == "Slurm":
        node, nodes = int(environ.get("SLURM_NODEID", 0)), int(environ.get("SLURM_STEP_NUM_NODES", 1))
        counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
        local_rank, local_size = launch.local_rank or 0, counts[node]
        host = first_host(environ.get("SLURM_STEP_NODELIST", ""))
        key = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    else:
        local_size = launch.local_world_size or size
        local_rank = launch.rank % local_size if launch.local_rank is None else launch.local_rank
        node, nodes = launch.rank // local_size, -(-size // local_size)
        host, key = "", environ.get("PMIX_NAMESPACE", "")
    host = environ.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else host)
    # Without numbers for this host, all ranks count as ranks of this host. The count is wrong if rank 0 is on another host, but
    # the script may not need the count. An MPI launcher has its own variables, so the advice below would not help there.
    is_guessed = not launch.is_mpi and None in (launch.local_rank, launch.local_world_size)
    if is_guessed and nodes == 1 and not _is_own(host):
        say(
            f"syncline run: rank {launch.rank}: no variable says which ranks are on this host, so LOCAL_RANK is {local_rank} "
            f"and LOCAL_WORLD_SIZE is {local_size}. But MASTER_ADDR={host} is another host: set both variables, for example to "
            "0 and 1 if each rank has a host or a pod of its own",
            sys.stderr,
        )
    port = environ.get("MASTER_PORT", "")
    if not key and port.isdecimal():
        key = f"{host}:{port}"
    elif not key and nodes == 1:
        # The ranks of one node probably have the same parent process. On another node the parent has another id.
        key = f"parent {os.getppid()}"
    lacks = [name for name, found in (("MASTER_ADDR", host), ("MASTER_PORT", key)) if not found]
    if lacks:
        raise LaunchError(
            f"the {size} ranks are on {nodes} nodes, and {' and '.join(lacks)} must say where rank 0 is: {problem}.\n"
            "Install what MPI needs, or give all ranks MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there"
        )
    return Job(
        rank=launch.rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=nodes,
        address=host,
        port=int(port) if port.isdecimal() else _FIRST_PORT + crc32(key.encode()) % _PORTS,
        run_id=f"{RUN_ID_PREFIX}env-{crc32(key.encode()):08x}",
        carrier=launch.launcher,
        local_cores=[cores_of_this_process()] * local_size,
        without_mpi=problem,
    )


def tasks_per_node(text: str) -> list[int]:
    """Read Slurm's list of tasks on each node: "4(x2),3" becomes [4, 4, 3]. A pure function."""
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm host list: "gpu07" for "gpu[07-09,12],login1". A pure function."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", hosts)[0])


# ---- where rank 0 listens ----


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def _agree_on_address(
    world: MPI.Intracomm, is_first_here: bool, crosses_nodes: bool, environ: Mapping[str, str]
) -> tuple[str, int]:
    """Return an address of rank 0's host and a free port of this host, the same on all ranks. This call is a collective.

    With several nodes, the ranks use an address of rank 0 that all other nodes have reached, or else the address that most of
    them have reached.
    """
    is_host = world.Get_rank() == 0
    port = world.bcast(_free_port(environ) if is_host else None)
    wanted = environ.get("MASTER_ADDR", "")
    if not crosses_nodes:
        return world.bcast((wanted if _is_own(wanted) else LOOPBACK) if is_host else None), port
    # Rank 0 listens at each of its addresses. The lowest rank of each other node tries all these addresses. See `addresses`.
    addresses: list[OwnAddress] = []
    problem = ""
    if is_host:
        try:
            addresses = addresses_for_others(chosen_interfaces(environ, load_settings().interface))
        except SynclineError as error:
            problem = str(error)
    with Doors(addresses) as doors:
        # Try the user's MASTER_ADDR first. A try is needed, because the name may lead to another host on another node.
        named = [(wanted, door) for _, door in doors.places] if wanted else []
        places, word, problem = world.bcast((named + doors.places, doors.word, problem) if is_host else None)
        tries = is_first_here and not is_host and not problem
        tried = try_doors(places, word, CancelScope(_START_S)) if tries else None
        told = world.allgather(tried)
    try:
        if problem:
            raise LaunchError(problem)
        return agreed_addresses(places, {rank: one for rank, one in enumerate(told) if one is not None})[0], port
    except LaunchError as error:
        # Go on: MPI makes its own connections, and most scripts never use the address of rank 0.
        if is_host:
            say(f"syncline run: MASTER_ADDR is this host's name: {error}", sys.stderr)
    return world.bcast(socket.gethostname()), port


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family):
            return address != ""
    except OSError:
        return False


def _free_port(environ: Mapping[str, str]) -> int:
    wanted = environ.get("MASTER_PORT", "")
    try:
        with socket.create_server(("", int(wanted) if wanted.isdecimal() else 0)) as listener:
            return int(listener.getsockname()[1])
    except (OSError, OverflowError):
        return free_port()
