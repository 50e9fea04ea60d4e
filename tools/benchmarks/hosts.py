"""Emulated hosts with one and two ranks each, joined by 1 Gbit/s: the gain from compression, bucket sizes and overlap.

    sudo python3 tools/dev.py bench hosts [--hosts 2] [--per-host 1 2] [--mpi mpich] [--parts hooks]

Needs Linux, root and iproute2, and starts mpiexec itself. The ranks share one machine: their computation competes for its
cores, and their messages go over an emulated wire whose bytes the kernel counts. The parts, for each number of ranks:

collective  one all-reduce of 25 MiB: ours on its own memory and on plain memory, MPI's own (raw-mpi), torch's Gloo; and the
bytes
            on the wire against the minimum, 2 (H - 1) / H of the size for each of H hosts
sizes       all-reduces of 1, 4, 25 and 64 MiB of plain memory: ours, MPI's own, torch's Gloo
hooks       steps of an MLP: MPI's own all-reduce, ours, each hook of ours, torch's DDP; and their bytes on the wire
halves      averaging 25 MiB of float32, as bfloat16, and as bfloat16 between hosts only; and the bytes on the wire
buckets     steps by bucket size, from one reduction a parameter to one in all
overlap     steps with buckets reduced during backward, after it, and not at all
sleeping    steps of layers that sleep instead of computing, ours and torch's DDP: how much communication shows, and how much
            the network's bandwidth makes unavoidable; for 2 to 8 hosts with a rank each
tune        steps with the buckets that bucket_cap_mb="auto" has chosen, compared with fixed sizes
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import mpi_runtimes
from commands import ToolError

from . import hosts_job, session
from .emulated_hosts import EmulatedHosts


def main(arguments: Sequence[str] | None = None) -> int:
    """Started once, by root, without mpiexec."""
    parser = session.parser(__doc__, list(hosts_job.PARTS))
    parser.add_argument("--per-host", nargs="+", type=session.at_least_one, default=[1, 2], metavar="N", help="default: 1 2")
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="2 to 8 (default: 2)")
    hosts_job.add_options(parser)
    parser.add_argument("--mpi", choices=("mpich", "openmpi"), default="mpich", help="default: mpich")
    options = session.parse(parser, arguments)
    try:
        return _run(options)
    except ToolError as error:
        print(f"bench hosts: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    runtime = mpi_runtimes.find(options.mpi)
    figures, statuses = {}, []
    with EmulatedHosts(options.rate, options.hosts) as hosts, tempfile.TemporaryDirectory() as folder:
        for per_host in options.per_host:
            print(f"=== {len(hosts.names)} hosts, {per_host} rank(s) each, {options.rate} ===", flush=True)
            kept = Path(folder) / f"{per_host}.json"
            words = (sys.executable, "-m", "benchmarks.hosts_job", *_passed_on(options, kept, per_host))
            statuses.append(hosts.run(runtime, per_host, words))
            if kept.exists():
                figures[f"{per_host} per host"] = json.loads(kept.read_text())
            print(flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"rate": options.rate, **figures}, indent=1) + "\n")
    return max(statuses)


def _passed_on(options: argparse.Namespace, kept: Path, per_host: int) -> list[str]:
    words = ["--parts", *options.parts, "--steps", str(options.steps), "--json", str(kept)]
    words += ["--cases", *options.cases, "--rate", options.rate]
    words += ["--layers", str(options.layers), "--layer-mib", str(options.layer_mib)]
    words += ["--quick"] if options.quick else []
    return words if options.plot is None else [*words, "--plot", str(options.plot.resolve() / f"{per_host}-per-host")]


if __name__ == "__main__":
    sys.exit(main())
