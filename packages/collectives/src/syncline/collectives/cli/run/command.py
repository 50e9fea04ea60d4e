"""The command `run`: read the options, refuse options that cannot work, then run the script."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn
from zlib import crc32

from ...errors import InvalidArgumentError, LaunchError, SynclineError
from ...startup.launch import take_launch
from ...startup.uncaught_errors import is_first, run_began_s, say
from ..options import seconds
from .answers import BACKENDS, DDP_ENTRY_POINTS, Answers
from .ending import Ending
from .ranks import Job, core_quota, find_job, set_variables, threads_for
from .script import Script, ScriptError, find_script, run_script

HELP = "run a script written for torchrun, unmodified: under mpirun or srun, or on ranks that this command starts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.error = _refuse  # type: ignore[method-assign] # one rank of a node prints the message, not every rank
    add = parser.add_argument
    add("-n", dest="ranks", type=_at_least_one, metavar="N", help="how many ranks to start on this machine, without mpirun")
    add("-m", dest="is_module", action="store_true", help="the script is a module, as in `python -m`")
    add("--backend", default="auto", metavar="|".join(BACKENDS), help="; ".join(f"{n}: {m}" for n, m in BACKENDS.items()))
    add(
        "--ddp",
        default="torch",
        metavar="torch|syncline",
        help="which DistributedDataParallel the script gets (default: torch)",
    )
    add("--timeout", type=seconds, metavar="S", help="time limit of a collective in seconds, if the script gives none")
    add("--trace", metavar="FOLDER", help="trace the steps of Syncline's DistributedDataParallel into this folder")
    add("--report-dir", metavar="FOLDER", help="where the ranks write reports when something fails")
    add("--tag-output", action="store_true", help="print the rank before each line of output")
    add("--quiet-others", action="store_true", help="show only the standard output of rank 0")
    add("script", help="the file to run; with -m, the module to run")
    add(
        "arguments",
        nargs=argparse.REMAINDER,
        help="arguments of the script; the options of this command come before the script",
    )


def main(words: Sequence[str]) -> int:
    """Run `syncline run` with these command-line arguments. Return the exit status, unless the script exits by itself."""
    parser = argparse.ArgumentParser(prog="syncline run", description=HELP, allow_abbrev=False)
    add_arguments(parser)
    return run(parser.parse_args(words))


def run(arguments: argparse.Namespace) -> int:
    """Run the script if this process is a rank. Otherwise (`-n N` without a launcher), start N ranks."""
    try:
        _check(arguments)
        job = find_job(os.environ, arguments.ranks)
        if job is not None and arguments.backend == "mpi" and job.world is None:
            raise LaunchError(f"--backend mpi: there is no MPI, for {job.without_mpi}")
        if job is None:
            from . import local  # imported here because a rank does not need it, and each import delays the script

            return local.start_ranks(arguments.ranks)
    except SynclineError as error:
        _refuse(str(error))
    ending = Ending(job)
    try:
        _redirect(arguments, job)
        _set_environment(arguments, job)
        ddp = None if arguments.ddp == "torch" else lambda: _load_ddp(arguments.ddp)
        Answers(job, arguments.backend, ddp, arguments.timeout).prepare()
    except BaseException as error:  # noqa: BLE001 - the other ranks would wait for this rank for ever
        ending.fail(error)
    try:
        script = _find(arguments, job, ending)
    except SystemExit:  # `_find` has told the other ranks
        raise
    except BaseException as error:  # noqa: BLE001 - as above; also an error in a package of the script's module
        ending.fail(error)
    try:
        _run(script, arguments.arguments, ending)
    finally:
        is_rank_0 = job.rank == 0 and os.getpid() == job.pid  # a forked child of rank 0 prints nothing
        if arguments.trace and is_rank_0 and "syncline.ddp" not in sys.modules:
            _say("--trace recorded nothing: the script used no DistributedDataParallel of Syncline; add `--ddp syncline`")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.backend not in BACKENDS:
        meanings = "; ".join(f"{name} ({meaning})" for name, meaning in BACKENDS.items())
        raise InvalidArgumentError(f"unknown --backend {arguments.backend!r}; known are {meanings}")
    if arguments.ddp != "torch":
        from ...plugins import plugin_names

        known = ["torch", *plugin_names(DDP_ENTRY_POINTS)]
        if arguments.ddp not in known:
            raise InvalidArgumentError(
                f"unknown --ddp {arguments.ddp!r}; installed are {', '.join(known)} (syncline is in the package syncline-ddp)"
            )


def _redirect(arguments: argparse.Namespace, job: Job) -> None:
    # MPICH's mpiexec gives ranks above 0 an input that never ends, so reading it would block for ever. Under torchrun, the
    # input of workers ends at once.
    has_endless_input = job.rank > 0 and "HYDI_CONTROL_FD" in os.environ
    if not (has_endless_input or arguments.tag_output or arguments.quiet_others):
        return
    from . import output

    if has_endless_input:
        output.end_stdin()
    if arguments.tag_output:
        output.tag_lines(job.rank)
    if arguments.quiet_others and job.rank > 0:
        output.silence_stdout()


def _set_environment(arguments: argparse.Namespace, job: Job) -> None:
    if arguments.trace is not None:
        os.environ["SYNCLINE_TRACE"] = _absolute(arguments.trace)
    if arguments.report_dir is not None:
        os.environ["SYNCLINE_REPORT_DIR"] = _absolute(arguments.report_dir)
    if arguments.timeout is not None:
        os.environ["SYNCLINE_TIMEOUT_S"] = f"{arguments.timeout:g}"
    threads = None
    if not os.environ.get("OMP_NUM_THREADS"):
        threads = threads_for(job.local_cores, job.local_rank, core_quota())
        os.environ["OMP_NUM_THREADS"] = str(threads)
    overridden = job.exchange(set_variables(job, os.environ))
    take_launch(os.environ)  # only this process is the rank; its children inherit the variables, but are no ranks
    if job.rank > 0:
        return
    if job.without_mpi is not None and job.size > 1:
        _say(f"no MPI carries these {job.size} ranks: {job.without_mpi}. They are counted by {job.carrier}")
    stale = next((names for names in overridden if names), None)
    if stale is not None:
        _say(f"overrides what a shell has left behind: {', '.join(stale)}")
    if not job.has_blocks:
        _say(
            "the ranks of a node are not neighbours. Under torchrun they are, and some scripts count on it: "
            "`srun --distribution=block`, `mpirun --map-by slot` (Open MPI), `mpirun -ppn N` (MPICH)"
        )
    if threads is not None and job.size > 1:
        _say(f"OMP_NUM_THREADS was not set; it is {threads} on rank 0, its share of the cores of its node")


def _load_ddp(name: str) -> type:
    from ...plugins import load_plugin

    found: type = load_plugin(DDP_ENTRY_POINTS, name, ())
    return found


def _find(arguments: argparse.Namespace, job: Job, ending: Ending) -> Script:
    """Find the script. All ranks call this function. If any rank cannot find the script, all ranks end."""
    problem: tuple[str, int] | None = None
    script = ended = None
    if arguments.is_module:  # the module's packages run before the module is found, as with `python -m`
        sys.argv[:] = ["-m", *arguments.arguments]
    try:
        script = find_script(arguments.script, is_module=arguments.is_module)
    except ScriptError as error:
        problem = str(error), error.status
    except SyntaxError as error:
        lines = "".join(traceback.format_exception_only(type(error), error))
        problem = f"the script is no Python:\n{lines.rstrip()}", 1
    except SystemExit as error:  # a module's package has ended the program
        ended = error
    problems = job.exchange(problem)
    first = next((rank for rank, found in enumerate(problems) if found is not None), None)
    if first is None and script is not None:
        return script
    text, status = ("", 0) if first is None else problems[first]
    if first is not None and job.world is not None:
        # The lowest rank that cannot find the script says why.
        if first == job.rank:
            _say(text if all(problems) else f"{job.who()}: {text}")
        job.exchange(None)  # the first rank that ends may end the job, so no rank ends before this text is written
    if ended is not None:
        ending.note_exit(ended)
        raise ended
    if job.world is None:
        _refuse(text, status)  # one rank of each node says why
    ending.status = status
    raise SystemExit(status)


def _run(script: Script, words: Sequence[str], ending: Ending) -> None:
    try:
        run_script(script, words)
    except SystemExit as error:
        ending.note_exit(error)
        raise
    except BaseException as error:  # noqa: BLE001 - nobody else catches the error, which ends the job
        # Leave out the frames above the script, so that the traceback begins in the script, as with `python`.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not script.code:
            trace = trace.tb_next
        ending.fail(error.with_traceback(trace or error.__traceback__))


def _refuse(message: str, status: int = 2) -> NoReturn:
    """End this process. If several ranks of a node refuse with the same message, only one of them prints the message."""
    # The file's name has the parent's process id. Each run of a launcher has its own parent, so no run silences another run.
    if is_first(f"refused-{os.getppid()}-{crc32(message.encode()):08x}", run_began_s()):
        _say(message)
    raise SystemExit(status)


def _say(message: str) -> None:
    say(f"syncline run: {message}")


def _absolute(folder: str) -> str:
    return os.path.abspath(folder) if folder else ""  # an empty text switches off what would be written there


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text!r}")
    return int(text)
