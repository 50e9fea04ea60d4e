"""The command `doctor`: check the facts that each rank reports, and print the findings on rank 0."""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import socket
import sys
from contextlib import suppress

import torch

from ...api.default_group import destroy_process_group, init_process_group
from ...api.object_exchange import exchange_objects
from ...errors import SynclineError
from ...group import ProcessGroup
from ...health.monitor import END_STATUS
from ...startup.launch import check_init_method, detect_launch
from ...startup.mpi_library import try_cuda_awareness
from ...startup.registry import BackendChoice, backend_names, choose_backend, what_is_missing
from ...startup.settings import load_settings
from ...startup.uncaught_errors import is_first, run_began_s
from .diagnosis import diagnose
from .finding import exit_status, in_text
from .observation import Observation, observe

HELP = "print and check what a job needs: MPI, nodes, cores, memory, GPUs, backends"

_PR_SET_PDEATHSIG = 1  # an option of Linux' prctl
CONNECT_TIMEOUT_S = 60.0
_CUDA_TIMEOUT_S = 45.0  # below the time limit above, because ranks without a GPU wait for the others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--backend", help="check this backend instead of the one that init_process_group would choose")
    parser.add_argument(
        "--init-method",
        metavar="URL",
        help="let the ranks meet as a job with this init_method, such as file:///shared/new-folder (not the folder of a job)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the doctor, and return the exit status. Every rank of the job must call this function.

    An MPI library that cannot start may end the process at once. So a child process starts MPI, and this process reports how
    the child has ended.
    """
    if not _starts_mpi():
        return _examine(arguments)
    # This process may have inherited that SIGCHLD is ignored. Then the system would keep no exit status of the child.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        _end_with_parent()
        status = _examine(arguments)
        os.write(told, b"examined")
        return status
    os.close(told)
    _, ended = os.waitpid(child, 0)
    status = os.waitstatus_to_exitcode(ended)
    return status if os.read(heard, 1) and status >= 0 else _say_what_ended(status, arguments)


def _starts_mpi() -> bool:
    try:
        launch = detect_launch(os.environ)
    except SynclineError:
        return False
    return launch is not None and launch.is_mpi and launch.least_world_size() > 1


def _end_with_parent() -> None:
    # The launcher knows and ends only the parent.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _say_what_ended(status: int, arguments: argparse.Namespace) -> int:
    """Print findings made without MPI, because the child process that starts MPI ended before it printed findings."""
    # One rank of each node prints. Rank 0 cannot print for all ranks: its child may still wait for another rank's child, which
    # has ended. The launcher may end the job before this wait ends.
    if not is_first(f"{os.getppid()} doctor", run_began_s()):
        return 1
    how = f"with status {status}" if status >= 0 else f"by signal {-status} ({signal.strsignal(-status)})"
    if status == END_STATUS:
        how = f"because not all ranks were connected within {CONNECT_TIMEOUT_S:g} s; look at the others"
    ended = f"the process that started MPI on {socket.gethostname()} ended {how}"
    choice = None
    with suppress(SynclineError):
        choice = _choice(arguments)
    observation = observe(os.environ, f"{ended}: look at /dev/shm below, and at what the library says above")
    findings = diagnose([observation], choice, ended, backends=backend_names())
    print(in_text(findings), flush=True)
    return 1


def _examine(arguments: argparse.Namespace) -> int:
    choice, problem, lack = None, None, None
    ranks: list[Observation] = []
    try:
        choice = _choice(arguments)
        aware = _cuda_awareness()
        group = init_process_group(choice.name, init_method=arguments.init_method, timeout=CONNECT_TIMEOUT_S)
        ranks, problem = _gather(group, aware)
        lack = group.missing_for_shrink()
    except SynclineError as error:
        problem = str(error)
    findings = diagnose(ranks or [_observe_alone()], choice, problem, lack, backends=backend_names())
    if _speaks(is_connected=bool(ranks)):
        print(in_text(findings), flush=True)
    destroy_process_group()
    return exit_status(findings)


def _choice(arguments: argparse.Namespace) -> BackendChoice:
    """Return the backend that `init_process_group` would choose."""
    return choose_backend(
        arguments.backend,
        os.environ,
        detect_launch(os.environ),
        what_is_missing,
        scheme=check_init_method(arguments.init_method),
        rendezvous_given=arguments.init_method is not None,
        settings=load_settings(os.environ),
    )


def _cuda_awareness() -> str | None:
    """Try whether MPI can send the memory of a GPU, and return the result in words; None if this cannot be tried here.

    Call this function before the ranks connect. Otherwise a transfer that hangs would look like missing ranks.
    """
    if not torch.cuda.is_available() or what_is_missing("mpi") is not None:
        return None
    return try_cuda_awareness(timeout_s=_CUDA_TIMEOUT_S).in_words


def _gather(group: ProcessGroup, aware: str | None) -> tuple[list[Observation], str | None]:
    observation = observe(os.environ, what_is_missing("mpi"), aware, _sharing(group))
    return exchange_objects(observation, group=group), _wrong_sum(group)


def _sharing(group: ProcessGroup) -> str | None:
    if "mpi" not in re.split("[:,]", group.backend_name):
        return None
    from ...transports.mpi.node.shared_allocation import probe_shared_memory

    return probe_shared_memory()


def _wrong_sum(group: ProcessGroup) -> str | None:
    indices = torch.arange(1000, dtype=torch.float64)
    total = indices * (group.rank + 1)
    group.all_reduce(total)
    right = torch.equal(total, indices * (group.size * (group.size + 1) // 2))
    wrong = [rank for rank, is_right in enumerate(exchange_objects(right, group=group)) if not is_right]
    return f"an all_reduce over {group.describe()} gave a wrong sum on rank(s) {wrong}" if wrong else None


def _observe_alone() -> Observation:
    return observe(os.environ, what_is_missing("mpi"))


def _speaks(*, is_connected: bool) -> bool:
    try:
        launch = detect_launch(os.environ)
    except SynclineError:
        return True
    # Usually only rank 0 prints. Without a connection and without MPI, rank 0 may not have started. Then one rank of each node
    # prints.
    if launch is None or launch.is_mpi or is_connected:
        return launch is None or launch.rank == 0
    return is_first(f"{os.getppid()} doctor", run_began_s())
