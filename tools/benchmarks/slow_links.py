"""Training over slow links: time, bytes and loss of DDP, compression hooks, local SGD and DiLoCo, on emulated hosts.

    sudo python3 tools/dev.py bench slow-links [--hosts 2 4] [--rate 20mbit] [--tasks text digits] [--json PATH] [--plot FOLDER]

Needs Linux, root and iproute2, and starts MPICH's mpiexec itself. Each host has one rank. Every contender begins with the same
model and sees the same samples in the same steps. The tasks:

text    a transformer of two layers predicts the next character of Python's own help texts (`pydoc_data.topics`)
digits  the network of packages/ddp/examples/digits on scikit-learn's handwritten digits

All of a table is one run, but the contenders train one after the other. So a disturbance of the machine may hit only one of
them. The kernel counts bytes on the wire, on the host that sends most; "in a step" is the step in which it sends most.
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

from . import session, slow_links_job
from .emulated_hosts import EmulatedHosts


def main(arguments: Sequence[str] | None = None) -> int:
    """Started once, by root, without mpiexec."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4], metavar="N", help="default: 2 4")
    parser.add_argument("--rate", default="20mbit", help="of each wire, as tc has it (default: 20mbit)")
    slow_links_job.add_options(parser)
    options = session.parse(parser, arguments)
    try:
        return _run(options)
    except ToolError as error:
        print(f"bench slow-links: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    runtime = mpi_runtimes.find("mpich")
    figures, statuses = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for count in options.hosts:
            kept = Path(folder) / f"{count}.json"
            words = (sys.executable, "-m", "benchmarks.slow_links_job", *_passed_on(options, kept, count))
            with EmulatedHosts(options.rate, count) as hosts:
                print(f"=== {count} hosts, one rank each, {options.rate} ===", flush=True)
                statuses.append(hosts.run(runtime, 1, words))
            if kept.exists():
                figures[f"{count} hosts"] = json.loads(kept.read_text())
    if options.json is not None:
        options.json.write_text(json.dumps({"rate": options.rate, **figures}, indent=1) + "\n")
    return max(statuses)


def _passed_on(options: argparse.Namespace, kept: Path, count: int) -> list[str]:
    words = ["--tasks", *options.tasks, "--contenders", *options.contenders, "--json", str(kept)]
    words += ["--quick"] if options.quick else []
    return words if options.plot is None else [*words, "--plot", str(options.plot.resolve() / f"{count}-hosts")]


if __name__ == "__main__":
    sys.exit(main())
