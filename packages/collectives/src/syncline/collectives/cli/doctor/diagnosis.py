"""Check the observations of the ranks, and return findings. All functions are pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...startup.mpi_library import LEAST_SHM_BYTES
from ...startup.nodes import place
from ...startup.registry import BackendChoice
from ...transports.shared_memory.memory_limit import room_for_each
from .finding import Finding, Status, ok, worst
from .observation import Observation

#: The versions of torch with which our tests were run (major and minor). Other versions may work.
RUN_WITH = ("2.6", "2.8", "2.10", "2.13", "2.14", "2.15")


def was_run(version: str) -> bool:
    """Return whether Syncline was tested with the major and minor version of this torch, such as "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2]) in RUN_WITH


Observations = Sequence[Observation]


def diagnose(
    ranks: Observations,
    choice: BackendChoice | None,
    problem: str | None,
    shrink_lack: str | None = None,
    *,
    backends: Sequence[str],
) -> list[Finding]:
    """Check the observations of all ranks of the job, and return the findings.

    Args:
        ranks: the observation of each rank, or only of this rank if the ranks could not connect.
        choice: the backend that a job would choose; None if the choice failed.
        problem: why the ranks could not connect or computed a wrong sum; None if there is no problem.
        shrink_lack: why the other ranks cannot continue after the loss of a rank; None if they can.
        backends: the names of the installed backends.
    """
    return [
        software(ranks),
        launcher(ranks),
        site_file(ranks),
        *mpi(ranks),
        *([unseen(ranks)] if len(ranks) < (ranks[0].launch_world_size or 1) else [nodes(ranks), cores(ranks)]),
        *memory(ranks),
        *gpus(ranks),
        backend(choice, backends),
        connection(len(ranks), problem),
        *(
            []
            if problem
            else [survival(ranks[0].launcher, len(ranks), shrink_lack, tolerates_faults=ranks[0].tolerates_faults)]
        ),
    ]


def software(ranks: Observations) -> Finding:
    """Check that all ranks have the same versions, and that Syncline was tested with this version of torch."""
    versions = [", ".join(f"{name} {version}" for name, version in rank.software) for rank in ranks]
    if len(set(versions)) > 1:
        return Finding("software", Status.WRONG, _differing(versions), "install the same versions on every node")
    torch = dict(ranks[0].software)["torch"]
    if was_run(torch):
        return ok("software", versions[0])
    found = f"{versions[0]}; the tests of this version of Syncline were not run with torch {torch}"
    remedy = f"if something fails, try torch {', '.join(RUN_WITH)}, and tell us"
    return Finding("software", Status.WARN, found, remedy)


def launcher(ranks: Observations) -> Finding:
    """Report the launcher that started the ranks, and check the launcher's variables."""
    problem = next((rank.launch_problem for rank in ranks if rank.launch_problem), None)
    if problem is not None:
        return Finding("launcher", Status.WRONG, problem, "clean the environment, or launch anew")
    first = ranks[0]
    if first.launcher is None:
        return ok("launcher", "none: this process is alone (start with mpirun, mpiexec, srun or torchrun for more)")
    if first.launch_warning is not None:
        return Finding("launcher", Status.WARN, first.launch_warning, "clean the environment, or start one job")
    size = "an unknown number of" if first.launch_world_size is None else str(first.launch_world_size)
    return ok("launcher", f"{first.launcher}, {size} process(es)")


def mpi(ranks: Observations) -> list[Finding]:
    """Check the MPI library and its thread level, and that the launcher belongs to the same MPI as the library."""
    loaded = [rank.mpi for rank in ranks if rank.mpi is not None]
    if not loaded:
        return [_mpi_not_loaded(ranks[0])]
    facts = loaded[0]
    libraries = [rank.mpi.library if rank.mpi else "none" for rank in ranks]
    found = f"{facts.library}, standard {facts.standard}, ABI {facts.abi}, mpi4py {facts.mpi4py}"
    if len(set(libraries)) > 1:
        library = Finding("MPI", Status.WRONG, _differing(libraries), "load the same MPI module on every node")
    else:
        library = ok("MPI", found)
    return [library, _thread_level(ranks), *_other_mpi(ranks)]


def nodes(ranks: Observations) -> Finding:
    """Report the ranks of each node. Warn if nodes have different numbers of ranks, because such jobs are slow."""
    placement = place(0, [rank.host for rank in ranks])
    per_node = Counter(placement.node_of)
    names = {placement.node_of[rank]: placement.hostnames[rank] for rank in range(len(ranks))}
    shown = ", ".join(
        f"{names[node]} with {count} (ranks {_span(placement.ranks_on_node(node))})" for node, count in per_node.items()
    )
    found = f"{placement.nodes} node(s), {len(ranks)} rank(s): {shown}"
    if len(set(per_node.values())) > 1:
        return Finding("nodes", Status.WARN, found, "give every node the same number of ranks: the fullest sets the pace")
    return ok("nodes", found)


def unseen(ranks: Observations) -> Finding:
    """Report that some ranks have no observation, because the ranks did not connect."""
    return Finding(
        "nodes",
        Status.WARN,
        f"{len(ranks)} of {ranks[0].launch_world_size} ranks looked at: the ranks could not be connected",
        "mend what is wrong here, then ask again: nodes and cores are judged once all ranks tell what they see",
    )


def _by_node(ranks: Observations) -> list[list[Observation]]:
    placement = place(0, [rank.host for rank in ranks])
    return [[ranks[rank] for rank in placement.ranks_on_node(node)] for node in range(placement.nodes)]


def cores(ranks: Observations) -> Finding:
    """Check that every node has enough cores for its ranks and their threads. Return the worst finding."""
    return worst(list(map(_cores_of_node, _by_node(ranks))))


def gpus(ranks: Observations) -> list[Finding]:
    """Check that there are enough GPUs, that MPI can send GPU memory, and that NCCL is installed.

    If no rank sees a GPU, the finding is OK.
    """
    if not any(rank.gpus for rank in ranks):
        return [ok("GPUs", "none visible to torch")]
    first = next(rank for rank in ranks if rank.gpus)
    found = f"{len(first.gpus)} visible to rank {list(ranks).index(first)}: {', '.join(sorted(set(first.gpus)))}"
    return [
        worst([_gpus_of_node(node, found) for node in _by_node(ranks)]),
        _cuda_awareness([rank.cuda_aware for rank in ranks]),
        _nccl(first),
    ]


def site_file(ranks: Observations) -> Finding:
    """Report the site file, and the settings that the file changes."""
    name = "site file"
    found = [rank.site_file for rank in ranks]
    if len(set(found)) > 1:
        return Finding(name, Status.WARN, _differing(found), "give every node the same site file")
    problem = ranks[0].site_problem
    return ok(name, found[0]) if problem is None else Finding(name, Status.WRONG, found[0], problem)


def backend(choice: BackendChoice | None, known: Sequence[str]) -> Finding:
    """Report the backend that a job would use, and the reason."""
    if choice is None:
        return Finding("backend", Status.WRONG, "none could be chosen", "mend what the line about the connection names")
    unknown = [name for name in _backends_in(choice.name) if name not in known]
    if unknown:
        remedy = f"name one of {', '.join(known)}, or install the package that offers '{unknown[0]}'"
        return Finding("backend", Status.WRONG, f"no backend '{unknown[0]}' is installed ({choice.reason})", remedy)
    found = f"{choice.name} ({choice.reason})"
    if "MPI cannot be used" in choice.reason:
        return Finding("backend", Status.WARN, found, "mend MPI: between the ranks of a node Gloo is several times slower")
    return ok("backend", found)


def connection(size: int, problem: str | None) -> Finding:
    """Report whether the ranks connected and computed the right sum."""
    if problem is None:
        return ok("connection", f"{size} rank(s) connected, and an all_reduce gave the right sum")
    return Finding("connection", Status.WRONG, problem, "mend what is WRONG above, if anything is, then run this command again")


def _backends_in(name: str) -> list[str]:
    # The name is, for example, "gloo" or "cpu:mpi,cuda:nccl".
    return [part.rpartition(":")[2].strip() for part in name.split(",")]


def _mpi_not_loaded(rank: Observation) -> Finding:
    if rank.mpi_lack is None:
        return ok("MPI", "available, not started")
    if rank.launcher is None or not rank.launch_is_mpi:
        return Finding("MPI", Status.WARN, "cannot be used here", rank.mpi_lack)
    return Finding("MPI", Status.WRONG, f"cannot be used, though {rank.launcher} launched this process", rank.mpi_lack)


def _thread_level(ranks: Observations) -> Finding:
    levels = [f"MPI_THREAD_{rank.mpi.thread_level}" if rank.mpi else "none" for rank in ranks]
    if set(levels) <= {"MPI_THREAD_MULTIPLE", "none"}:
        return ok("MPI threads", "MPI_THREAD_MULTIPLE")
    return Finding(
        "MPI threads",
        Status.WRONG,
        _differing(levels),
        "backend 'mpi' needs MPI_THREAD_MULTIPLE: do not lower mpi4py.rc.thread_level, or use another MPI build",
    )


def _other_mpi(ranks: Observations) -> list[Finding]:
    contradictions = [_contradiction(rank) for rank in ranks]
    if not any(contradictions):
        return []
    return [
        Finding(
            "MPI world",
            Status.WRONG,
            _differing([contradiction or "the same number" for contradiction in contradictions]),
            "the launcher and the library belong to different MPIs: use the library's own mpiexec, or set MPI4PY_LIBMPI to the "
            "launcher's libmpi.so",
        )
    ]


def _contradiction(rank: Observation) -> str:
    told = rank.launch_world_size
    if rank.mpi is None or told is None or told == rank.mpi.world_size or not rank.launch_is_mpi:
        return ""
    return f"{rank.launcher} started {told} process(es), {rank.mpi.library} sees {rank.mpi.world_size}"


def _cores_of_node(ranks: Observations) -> Finding:
    usable = frozenset[int]().union(*(rank.cores for rank in ranks))
    threads = max(rank.threads for rank in ranks)
    shares = f"{len(ranks)} rank(s) share {len(usable)} of {ranks[0].node_cores} core(s) on {ranks[0].host.hostname}"
    if len(usable) < len(ranks):
        return _too_few_cores(shares, len(ranks), len(usable), ranks[0].node_cores)
    found = f"{shares}, {threads} thread(s) each"
    if threads * len(ranks) > len(usable) and len(ranks) > 1:
        share = max(1, len(usable) // len(ranks))
        return Finding("cores", Status.WARN, found, f"set OMP_NUM_THREADS={share}, or the ranks take each other's cores")
    return ok("cores", found)


def _too_few_cores(shares: str, ranks: int, usable: int, node_cores: int) -> Finding:
    if node_cores >= ranks:
        remedy = "the launcher binds ranks to the same cores: try `--bind-to none` (mpirun) or `--cpus-per-task` (srun)"
        return Finding("cores", Status.WRONG, shares, remedy)
    return Finding(
        "cores", Status.WARN, shares, f"start at most {usable} rank(s) there, or expect them to wait for one another"
    )


def _gpus_of_node(ranks: Observations, found: str) -> Finding:
    seen = {gpu for rank in ranks for gpu in rank.gpu_ids}
    if not seen or len(seen) >= len(ranks):
        return ok("GPUs", found)
    remedy = (
        f"NCCL needs a GPU for each rank: start at most {len(seen)} rank(s) there, or show the others their own "
        "(srun --gpus-per-task=1)"
    )
    shared = f"the {len(ranks)} ranks on {ranks[0].host.hostname} see {len(seen)} together ({found})"
    return Finding("GPUs", Status.WARN, shared, remedy)


def _cuda_awareness(results: Sequence[str | None]) -> Finding:
    name = "CUDA-aware MPI"
    tried = [result for result in results if result is not None]
    if not tried:
        return ok(name, "not tried: MPI cannot be used where there are GPUs")
    if all(result.startswith("yes") for result in tried):
        return ok(name, tried[0])
    return Finding(
        name,
        Status.WARN,
        _differing([result or "not tried" for result in results]),
        "CUDA tensors travel through pinned host memory; a CUDA-aware MPI or NCCL is faster",
    )


def _nccl(rank: Observation) -> Finding:
    if rank.cupy is None:
        remedy = "for NCCL, `pip install cupy-cuda12x nvidia-nccl-cu12` (or cupy-cuda13x nvidia-nccl-cu13)"
        return Finding("NCCL", Status.WARN, "CuPy is not installed or cannot be imported", remedy)
    if rank.nccl is None:
        remedy = "`pip install nvidia-nccl-cu12` (or -cu13), to match CuPy's CUDA"
        return Finding("NCCL", Status.WARN, f"CuPy {rank.cupy} finds no NCCL", remedy)
    return ok("NCCL", f"NCCL {rank.nccl} through CuPy {rank.cupy}")


def _differing(values: Sequence[str]) -> str:
    where: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        where.setdefault(value, []).append(rank)
    return "; ".join(f"ranks {_span(ranks)}: {value}" for value, ranks in where.items())


def _span(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


# ---- whether the job survives the loss of a rank ----


_LOSS = "loss of a rank"

# These launchers end the job when one process is killed.
_ENDS_THE_JOB = {
    "torchrun": "torchrun ends all ranks of a machine when one of them ends",
    "Open MPI": "mpirun ends the job when a process is killed, unless it was given --with-ft ulfm",
    "PMI (MPICH, Intel MPI)": "mpiexec ends the job when a process is killed",
    "PMIx": "its launcher ends the job when a process is killed",
}
_IF_TOLD_SO = {"Slurm": "if srun was given --no-kill --kill-on-bad-exit=0"}


def survival(launcher: str | None, size: int, lack: str | None, *, tolerates_faults: bool = False) -> Finding:
    """Report whether the other ranks can continue after the loss of a rank. The status is always OK.

    Args:
        launcher: the name of the launcher; None if there is no launcher.
        size: the number of ranks.
        lack: why the group cannot shrink; None if it can.
        tolerates_faults: whether mpirun lets the other ranks run when a rank is lost (`--with-ft ulfm`).
    """
    if size == 1:
        return ok(_LOSS, "nobody would be left: there is one rank")
    if lack is not None:
        return ok(_LOSS, f"this job does not survive it: {lack}")
    if launcher in _ENDS_THE_JOB and not tolerates_faults:
        return ok(_LOSS, f"this job does not survive it: {_ENDS_THE_JOB[launcher]}; start the ranks by hand or with srun")
    condition = f", {_IF_TOLD_SO[launcher]}" if launcher in _IF_TOLD_SO else ""
    return ok(_LOSS, f"this job can survive it{condition}: the ranks that are left can shrink the group (syncline.ddp.Elastic)")


# ---- memory ----


# A few buckets of 25 MiB are in use at a time, for input and output. With less memory than this, gradients do not fit.
LEAST_BYTES = 128 * 2**20

_MORE = "give the job more memory (Slurm's --mem or --mem-per-cpu, a container's --memory)"


def memory(ranks: Sequence[Observation]) -> list[Finding]:
    """Check whether the ranks can share memory, how much memory is left, and how large /dev/shm is."""
    has_fences = all(rank.has_fence for rank in ranks)
    return [_sharing(ranks[0].sharing, has_fences), worst(list(map(_left_on, _by_node(ranks)))), _dev_shm(ranks)]


def _sharing(result: str | None, has_fences: bool) -> Finding:
    """Judge whether ranks can share memory.

    `result` is what `probe_shared_memory` returned; None if it was not called.
    """
    name = "shared memory"
    if result is None:
        return ok(name, "not tried: the ranks are not connected by MPI")
    if result.startswith("no:"):
        remedy = f"gradients travel by plain MPI, which is slower: start the ranks of a node in one container, or {_MORE}"
        return Finding(name, Status.WARN, result, remedy)
    if not has_fences:
        remedy = (
            "ranks then meet by MPI, which is slower for small tensors: install libatomic (Debian's libatomic1) on all nodes"
        )
        return Finding(name, Status.WARN, f"{result}, but libatomic.so.1 is missing on a node", remedy)
    return ok(name, result)


def _left_on(ranks: Sequence[Observation]) -> Finding:
    """Judge how much memory is left for each rank of a node."""
    room = room_for_each([rank.memory_limits for rank in ranks])
    if room is None:
        return ok("memory", "this system does not say how much is left")
    found = (
        f"{in_bytes(room.each_bytes)} left for each of {len(ranks)} rank(s) on {ranks[0].host.hostname}, by {room.limit.name}"
    )
    if room.each_bytes >= LEAST_BYTES:
        return ok("memory", found)
    return Finding("memory", Status.WARN, found, f"have {in_bytes(LEAST_BYTES)} or more for the buckets of gradients: {_MORE}")


def _dev_shm(ranks: Sequence[Observation]) -> Finding:
    least = min(ranks, key=lambda rank: rank.shm_free_bytes)
    found = (
        f"{in_bytes(least.shm_total_bytes)}, {in_bytes(least.shm_free_bytes)} free on {least.host.hostname} (MPI libraries use "
        "it, Syncline does not)"
    )
    if least.shm_total_bytes >= LEAST_SHM_BYTES or not least.launch_is_mpi or least.launch_world_size == 1:
        return ok("/dev/shm", found)
    remedy = (
        f"with less than {in_bytes(LEAST_SHM_BYTES)} MPICH may crash while it starts: give the container more, such as "
        "`docker run --shm-size=1g`"
    )
    return Finding("/dev/shm", Status.WRONG if least.mpi is None else Status.WARN, found, remedy)


def in_bytes(size: int) -> str:
    """Format a size in MiB or GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
