"""Growth with the number of ranks: messages, connections, store requests and memory of each rank, counted and extrapolated.

    python3 tools/dev.py bench growth [--over gloo mpi] [--ranks 2 4 8 16] [--per-host 1] [--json PATH]

Starts the ranks itself, all on this machine; they only communicate. Each rank plays a host of its own, or several neighbouring
ranks play one (`--per-host`). MPI is MPICH over TCP, with options so that it does not notice the common host. It counts data
segments and connections, as the kernel counts them for each rank's sockets; requests to the TCP store; and resident memory that
a process does not share. The table has the median of the ranks, and the largest number if it differs.

The counts are compared with the formulas of docs/reference/scaling.md, or fitted if a library decides. Numbers of ranks should
be powers of two. The status is 1 if a formula is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import mpi_runtimes
from commands import ToolError
from syncline.collectives.cli.bench.results import aligned
from syncline.collectives.stores import TCPStoreServer, new_secret
from syncline.collectives.testing.processes import run_processes
from test_support.preloaded import PreloadedPython

from . import session
from .growth_counting import Counts
from .growth_formulas import FORMULAS, Fit, Job, Points, fit, least_squares

FAR = 10_000
_TIMEOUT_S = 500.0
_JOB = Path(__file__).with_name("growth_job.py")
_OVER_TCP = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
_MEMORY_OF = ("start of MPI", "start-up", "new_group", "construction of DDP")  # in other phases it changes by a page or so

Found = dict[str, list[Counts]]
"""By phase what each rank counted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Started once, without mpiexec."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over", nargs="+", choices=["gloo", "mpi"], default=["gloo", "mpi"], help="default: both")
    parser.add_argument("--ranks", nargs="+", type=session.at_least_one, default=[2, 4, 8, 16], metavar="N")
    parser.add_argument("--per-host", type=session.at_least_one, default=1, metavar="L", help="ranks on each host (default: 1)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all counts to this file")
    options = parser.parse_args(arguments)
    is_right, kept = True, {}
    try:
        for over in options.over:
            found = {ranks: count(over, Job(ranks, options.per_host)) for ranks in options.ranks}
            rows, held = compared(over, found, options.per_host)
            is_right = is_right and held
            kept[over] = {
                ranks: {phase: list(map(Counts._asdict, of)) for phase, of in phases.items()} for ranks, phases in found.items()
            }
            print(f"=== {over}: each rank, {options.per_host} on each host ===\n{aligned(rows)}", flush=True)
    except ToolError as error:
        print(f"bench growth: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if is_right else 1


def count(over: str, job: Job) -> Found:
    """The counts of each rank of a job."""
    with tempfile.TemporaryDirectory() as name:
        folder, secret = Path(name), new_secret()
        server = TCPStoreServer(secret=secret)
        options = {"store": [server.host, server.port, secret], "per_host": job.per_host}
        (folder / "options.json").write_text(json.dumps(options))
        try:
            (_over_gloo if over == "gloo" else _over_mpi)(job.ranks, folder)
        finally:
            server.close()
        ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(job.ranks)]
    return {phase: [Counts(**rank[phase]) for rank in ranks] for phase in ranks[0]}


def _over_gloo(ranks: int, folder: Path) -> None:
    run_processes(_JOB, ranks, folder, timeout_s=_TIMEOUT_S)


def _over_mpi(ranks: int, folder: Path) -> None:
    runtime = mpi_runtimes.find("mpich")
    with PreloadedPython(folder) as python:
        command = [*runtime.command(ranks), *python.command, str(_JOB), "mpi", str(ranks), str(folder)]
        environ = {**os.environ, **runtime.env, **_OVER_TCP}
        if (status := subprocess.run(command, env=environ, timeout=_TIMEOUT_S).returncode) != 0:
            raise ToolError(f"{ranks} ranks over MPI ended with status {status}; see what they said above")


def compared(over: str, found: Mapping[int, Found], per_host: int) -> tuple[list[tuple[str, ...]], bool]:
    """A table of all counts that are not always 0, with formulas or fits and their values at `FAR` ranks; whether all hold."""
    rows: list[tuple[str, ...]] = [("phase", "what", *(f"N={ranks}" for ranks in found), "formula", f"at {FAR:,}", "")]
    is_right = True
    for phase in next(iter(found.values())):
        for what in Counts._fields:
            columns = {ranks: [getattr(counted, what) for counted in phases[phase]] for ranks, phases in found.items()}
            points = [(ranks, statistics.median_low(column)) for ranks, column in columns.items()]
            formula = FORMULAS.get((over, phase, what))
            if formula is None and not _is_shown(phase, what, points):
                continue
            shown = [_shown(what, column) for column in columns.values()]
            if formula is None:
                law = _fitted(what, points)
                rows.append((phase, what, *shown, f"~ {law}", f"{law.at(FAR):,.0f}", "fit"))
            else:
                held = all(formula.value(Job(ranks, per_host)) == value for ranks, value in points)
                is_right = is_right and held
                far = f"{formula.value(Job(FAR, per_host)):,}"
                rows.append((phase, what, *shown, formula.text, far, "held" if held else "WRONG"))
    return rows, is_right


def _is_shown(phase: str, what: str, points: Points) -> bool:
    if what == "memory_bytes" and phase not in _MEMORY_OF:
        return False
    return any(value for _, value in points)


def _fitted(what: str, points: Points) -> Fit:
    """Memory is too noisy to distinguish laws, so it is shown as proportional to each rank's part."""
    return least_squares(points, ("", "N")) if what == "memory_bytes" else fit(points)


def _shown(what: str, column: Sequence[int]) -> str:
    median, largest = statistics.median_low(column), max(column)
    return f"{median}" if what == "memory_bytes" or largest == median else f"{median} ({largest})"


if __name__ == "__main__":
    sys.exit(main())
