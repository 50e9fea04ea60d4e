"""Start the ranks on this machine, with the installed MPI or as child processes."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ...errors import LaunchError
from ...startup.uncaught_errors import say
from .ranks import free_port, started_id

# Signals that are passed on to the ranks. A Ctrl-C from the terminal is not passed on; see `_supervise`.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_GRACE_S = 10.0
_SI_USER = 0


def start_ranks(count: int) -> int:
    """Run the command line of this process again, on `count` ranks of this machine.

    With MPI, mpiexec replaces this process, so this function does not return. Without MPI, the ranks are child processes.

    Returns:
        The exit status of the first rank that failed, or 128 plus the number of the signal that ended this rank. 0 if no rank
        failed.

    Raises:
        LaunchError: this machine cannot start so many processes, or mpiexec would misunderstand an argument of the script.
    """
    command = _this_command()
    mpiexec = _mpiexec() if find_spec("mpi4py") is not None else None
    if mpiexec is not None:
        if ":" in command:
            raise LaunchError(
                "the argument ':' cannot be passed on, because mpiexec begins another program there; write it together with "
                "its option (--separator=:)"
            )
        os.execve(mpiexec, [mpiexec, "-n", str(count), *command], {**os.environ, **_for_open_mpi()})
    return _start_processes(command, count)


def _this_command() -> list[str]:
    # These words include the options of Python itself.
    words = sys.orig_argv
    return [sys.executable, *words[1:]]


def _mpiexec() -> str | None:
    """Return the path of mpiexec: beside the library in `MPI4PY_LIBMPI`, else where pip installs it, else from PATH."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    named = os.environ.get("MPI4PY_LIBMPI")
    if named:  # lib/libmpi.so, or lib/release/libmpi.so
        for folder in Path(named).resolve().parents[1:3]:
            if (folder / "bin" / "mpiexec").exists():
                return str(folder / "bin" / "mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def _for_open_mpi() -> dict[str, str]:
    wanted = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PRTE_MCA_hwloc_default_binding_policy": "none"}
    wanted |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
    if os.geteuid() == 0:
        wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _start_processes(command: Sequence[str], count: int) -> int:
    common = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": f"{started_id(os.getpid())}{secrets.token_hex(4)}",
    }
    # This process may have inherited that SIGCHLD is ignored. Then the system would keep no exit statuses of the ranks.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Let a signal that comes while the ranks start wait for `_supervise`. Otherwise the signal would end only this process.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*_SIGNALS, signal.SIGCHLD))

    def receive_signals() -> None:
        # The terminal sends Ctrl-C also to a child that does not run the command yet. Here Python's handler would raise
        # KeyboardInterrupt, and Popen would report that the start has failed.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    ranks = list[subprocess.Popen[bytes]]()
    try:
        for rank in range(count):
            process = subprocess.Popen(
                command,
                env={**os.environ, **common, "RANK": str(rank)},
                stdin=None if rank == 0 else subprocess.DEVNULL,  # as mpiexec does
                preexec_fn=receive_signals,
            )
            ranks.append(process)
    except (OSError, subprocess.SubprocessError) as error:
        _send(ranks, signal.SIGKILL)
        for started in ranks:
            started.wait()
        raise LaunchError(
            f"this machine cannot start rank {len(ranks)} of {count}: {error}; the ranks before it are ended. Start fewer "
            "ranks (-n), or raise the limit for processes (`ulimit -u`)"
        ) from error
    return _supervise(ranks)


def _supervise(ranks: list[subprocess.Popen[bytes]]) -> int:
    status = 0
    end_s = float("inf")
    was_told = False  # a signal for all ranks has come, so a rank that ends now has not failed by itself
    # The ranks inherit what this process ignores, such as SIGHUP under nohup, so such a signal ends no rank.
    ending = {
        number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN
    }
    while running := [rank for rank in ranks if rank.poll() is None]:
        failed = next((rank.returncode for rank in ranks if rank.returncode), 0)
        if failed and not status:
            status = failed if failed > 0 else 128 - failed
            end_s = time.monotonic() + _GRACE_S
            if not was_told:
                _tell_of_first(ranks)
            _send(running, signal.SIGTERM)
        elif time.monotonic() > end_s:
            _send(running, signal.SIGKILL)
        heard = signal.sigtimedwait((*_SIGNALS, signal.SIGCHLD), 1.0)
        was_told |= heard is not None and heard.si_signo in ending
        # A code above SI_USER means Ctrl-C at a terminal, which reaches all ranks. Do not send them the signal twice.
        if heard is not None and heard.si_signo != signal.SIGCHLD and heard.si_code <= _SI_USER:
            _send(running, signal.Signals(heard.si_signo))
    failed = next((rank.returncode for rank in ranks if rank.returncode), 0)
    return status or (failed if failed >= 0 else 128 - failed)


def _tell_of_first(ranks: list[subprocess.Popen[bytes]]) -> None:
    # A rank that was killed cannot say so itself.
    number, rank = next((number, rank) for number, rank in enumerate(ranks) if rank.returncode)
    how = f"exited with status {rank.returncode}"
    if rank.returncode < 0:
        how = f"was ended by signal {-rank.returncode} ({signal.strsignal(-rank.returncode)})"
    say(f"syncline run: rank {number} (pid {rank.pid}) {how}; the other ranks are ended")


def _send(ranks: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for rank in ranks:
        rank.send_signal(number)
