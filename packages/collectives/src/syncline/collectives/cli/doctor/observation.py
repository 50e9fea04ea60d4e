"""Facts about the machine and the software of one process. Ranks can compare these facts."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ...api.placement import visible_devices
from ...errors import LaunchError, SynclineError
from ...startup.launch import Launch, detect_launch, several_torchrun_jobs, tolerates_faults
from ...startup.nodes import HostIdentity, host_identity
from ...startup.settings import SITE_VARIABLE, load_settings, site_path
from ...transports.shared_memory.memory_limit import Limit, memory_limits
from ...transports.shared_memory.os_memory import find_fence

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class MPIFacts:
    """Facts about the MPI library that runs in this process.

    Attributes:
        library: the name and version, such as "MPICH 5.0.2".
        standard: the version of the MPI standard, such as "4.1".
        abi: the binary interface of the loaded mpi4py module, such as "mpich".
        thread_level: "SINGLE", "FUNNELED", "SERIALIZED" or "MULTIPLE".
    """

    library: str
    standard: str
    abi: str
    thread_level: str
    world_size: int
    mpi4py: str


@dataclass(frozen=True)
class Observation:
    """Facts about the node, the software and the launcher of one process.

    Attributes:
        software: names and versions of the software that must be the same on every rank.
        launcher: the name of the launcher, such as "Slurm"; None without a launcher.
        launch_problem: an error in the launcher's variables; None if there is no error.
        launch_warning: the reason why the ranks may be parts of several jobs; None if there is no reason.
        launch_world_size: the number of processes according to the launcher; None if unknown.
        launch_is_mpi: whether the launcher starts MPI programs.
        mpi: facts about the MPI library; None if MPI does not run in this process.
        mpi_lack: the reason why MPI cannot be used on this host; None if it can.
        cores: the cores that this process may run on.
        threads: the number of threads with which torch computes.
        shm_total_bytes, shm_free_bytes: the size of /dev/shm, and its free space. 0 if there is no /dev/shm.
        sharing: whether the ranks of the node can share memory, as text; None if not tested.
        gpus, gpu_ids: the names and the UUIDs of the visible CUDA devices.
        cupy, nccl: the version of CuPy, and the version of NCCL that CuPy finds; None if missing.
        cuda_aware: whether MPI can send CUDA memory, as text; None if not tested.
        tolerates_faults: whether mpirun lets the other ranks run when a rank is lost (`--with-ft ulfm`).
        has_fence: whether Syncline has a memory fence for this processor. Shared memory needs such a fence.
        site_file: the path of the site file and the keys that this file changes, as text.
        site_problem: why the site file cannot be read, and the remedy; None if there is no problem.
    """

    host: HostIdentity
    software: tuple[tuple[str, str], ...]
    launcher: str | None
    launch_problem: str | None
    launch_world_size: int | None
    mpi: MPIFacts | None
    mpi_lack: str | None
    cores: frozenset[int]
    node_cores: int
    threads: int
    shm_total_bytes: int
    shm_free_bytes: int
    memory_limits: tuple[Limit, ...] = ()
    sharing: str | None = None
    gpus: tuple[str, ...] = ()
    gpu_ids: tuple[str, ...] = ()
    cupy: str | None = None
    nccl: str | None = None
    cuda_aware: str | None = None
    launch_warning: str | None = None
    launch_is_mpi: bool = True
    tolerates_faults: bool = False
    has_fence: bool = True
    site_file: str = "none"
    site_problem: str | None = None


def observe(
    environ: Mapping[str, str], mpi_lack: str | None, cuda_aware: str | None = None, sharing: str | None = None
) -> Observation:
    """Collect the facts about this process, without communication, and without starting MPI."""
    launch, problem = _launch(environ)
    shm_total, shm_free = _shared_memory()
    cupy, nccl = _cupy()
    site, site_problem = _site_file(environ)
    return Observation(
        host=host_identity(),
        software=_software(),
        launcher=None if launch is None else launch.launcher,
        launch_problem=problem,
        launch_warning=None if launch is None else several_torchrun_jobs(launch, environ),
        launch_world_size=None if launch is None else launch.world_size,
        launch_is_mpi=launch is not None and launch.is_mpi,
        mpi=_mpi(),
        mpi_lack=mpi_lack,
        cores=frozenset(os.sched_getaffinity(0)),
        node_cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        shm_total_bytes=shm_total,
        shm_free_bytes=shm_free,
        memory_limits=tuple(memory_limits()),
        sharing=sharing,
        gpus=_gpus(),
        gpu_ids=tuple(visible_devices()),
        cupy=cupy,
        nccl=nccl,
        cuda_aware=cuda_aware,
        tolerates_faults=tolerates_faults(environ),
        has_fence=find_fence() is not None,
        site_file=site,
        site_problem=site_problem,
    )


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution, or "not installed"."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _software() -> tuple[tuple[str, str], ...]:
    return (
        ("syncline-collectives", version_of("syncline-collectives")),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
    )


def _site_file(environ: Mapping[str, str]) -> tuple[str, str | None]:
    path = site_path(environ)
    try:
        settings = load_settings({SITE_VARIABLE: environ.get(SITE_VARIABLE, "")})
    except SynclineError as error:
        return str(path), str(error)
    if settings.path is None:
        return f"none: there is no {path}", None
    keys = settings.changed()
    return f"{path} changes {', '.join(keys) if keys else 'nothing'}", None


def _launch(environ: Mapping[str, str]) -> tuple[Launch | None, str | None]:
    try:
        return detect_launch(environ), None
    except LaunchError as error:
        return None, str(error)


def _mpi() -> MPIFacts | None:
    if "mpi4py.MPI" not in sys.modules:
        return None
    from mpi4py import MPI

    from ...transports.mpi.library import library_name

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    levels = {
        MPI.THREAD_SINGLE: "SINGLE",
        MPI.THREAD_FUNNELED: "FUNNELED",
        MPI.THREAD_SERIALIZED: "SERIALIZED",
        MPI.THREAD_MULTIPLE: "MULTIPLE",
    }
    return MPIFacts(
        library=library_name(),
        standard=".".join(map(str, MPI.Get_version())),
        abi=_abi(Path(MPI.__file__).name),
        thread_level=levels[MPI.Query_thread()],
        world_size=MPI.COMM_WORLD.Get_size(),
        mpi4py=version_of("mpi4py"),
    )


def _abi(file_name: str) -> str:
    # Wheels of mpi4py have a module for each binary interface (ABI), such as MPI.openmpi.cpython-311-x86_64-linux-gnu.so.
    word = file_name.split(".")[1]
    return "the one that mpi4py was built for" if word.startswith(("cpython", "abi3", "so")) else word


def _shared_memory() -> tuple[int, int]:
    if not SHARED_MEMORY.is_dir():
        return 0, 0
    usage = shutil.disk_usage(SHARED_MEMORY)
    return usage.total, usage.free


def _gpus() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _cupy() -> tuple[str | None, str | None]:
    try:
        import cupy
    except Exception:  # noqa: BLE001 - a CuPy that does not find its CUDA raises errors of many types
        return None, None
    try:
        from cupy.cuda import nccl

        number = int(nccl.get_version())
    except Exception:  # noqa: BLE001 - for the same reason
        return str(cupy.__version__), None
    return str(cupy.__version__), nccl_version_in_words(number)


def nccl_version_in_words(number: int) -> str:
    """Convert NCCL's version number to text: 22703 is "2.27.3", and 2804 (before NCCL 2.9) is "2.8.4"."""
    step = 10_000 if number >= 10_000 else 1_000
    return f"{number // step}.{number % step // 100}.{number % 100}"
