"""The quality of the buckets that `bucket_cap_mb="auto"` chooses, compared with fixed sizes from 0.5 to 100 MiB.

    python3 tools/dev.py bench tune [--parts mpi] [--cases mlp tiny] [--steps 20] [--json PATH]

All train copies of one model in one process, and take turns; the tuning contender tunes first. A ratio compares two steps of
the same round. The table has the median and quartiles over all rounds. The parts:

mpi    on the group of the MPI that started the ranks
gloo   on a group over Gloo of the same ranks

The layers of the last model sleep instead of computing, so that communication takes no core away from them.

Over a wire of limited rate: `bench hosts --parts tune --per-host 1`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from syncline.collectives import ProcessGroup
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.startup.rendezvous import tcp_store_of_rank_0
from syncline.collectives.transports import gloo

from . import session
from .cases import FULL, Case, Scale, many_tiny, mlp, transformer
from .report import Report
from .sleeping import sleeping_layers
from .tuned_buckets import compare

CASES: dict[str, Callable[[Scale], Case]] = {
    "mlp": lambda scale: mlp(16, scale),
    "transformer": lambda scale: transformer(2, scale),
    "tiny": many_tiny,
    "sleeping": lambda scale: sleeping_layers(0.01 * scale.layers / FULL.layers),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank of the job calls it."""
    parser = session.parser(__doc__, list(PARTS))
    add_cases(parser)
    return session.play_parsed("tune", PARTS, session.parse(parser, arguments))


def add_cases(parser: argparse.ArgumentParser) -> None:
    """The option that names models."""
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="models to tune for (default: all)")


def tune(options: argparse.Namespace, group: ProcessGroup, report: Report, part: str = "tune") -> None:
    """A part of a benchmark with this option. A collective."""
    cases = [CASES[name](session.scale(options)) for name in options.cases]
    compare(part, cases, group, options.steps, report)


def _over_mpi(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    tune(options, group, report, "mpi")


def _over_gloo(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    over_gloo = _gloo_group(group)
    tune(options, over_gloo, report, "gloo")
    over_gloo.close()


def _gloo_group(group: ProcessGroup) -> HostGroup:
    """A group over Gloo of the same ranks, on one machine. A collective."""
    store = tcp_store_of_rank_0(group, group.timeout_s)
    transport = gloo.connect(store, group.rank, group.size, "tune", CancelScope(group.timeout_s))
    return HostGroup(transport, group.rank, group.size, name="tune", timeout_s=group.timeout_s)


PARTS: dict[str, session.Part] = {"mpi": _over_mpi, "gloo": _over_gloo}

if __name__ == "__main__":
    sys.exit(main())
