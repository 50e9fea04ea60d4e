"""What `Elastic` costs while no rank is lost: steps with and without it, on two ranks over Gloo.

    python3 tools/dev.py bench elastic [--rounds 40] [--json PATH]

Starts two processes itself. Both contenders are the same model in the same processes, and take turns, a few steps at a time. A
ratio is that of neighbouring turns; shown are its median and quartiles.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from syncline.collectives.commands.bench.results import aligned
from syncline.collectives.testing.processes import run_processes

from . import session
from .summary import Summary

_RANKS = 2
_TIMEOUT_S = 590.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Started once, without mpiexec."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=session.at_least_one, default=40, metavar="N", help="turns of each (default: 40)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="tiny models: shows that it runs; the figures mean nothing")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "options.json").write_text(json.dumps({"rounds": options.rounds, "quick": options.quick}))
        run_processes(Path(__file__).with_name("elastic_job.py"), _RANKS, folder, timeout_s=_TIMEOUT_S)
        found: dict[str, dict[str, list[float]]] = json.loads((folder / "steps.json").read_text())
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    rows = [("model", "without, ms", "with Elastic, ms", "ratio")]
    for case, steps_s in found.items():
        plain, elastic = Summary.of(steps_s["plain"]), Summary.of(steps_s["elastic"])
        ratio = Summary.of([one / other for one, other in zip(steps_s["elastic"], steps_s["plain"], strict=True)])
        rows.append((case, plain.in_ms(), elastic.in_ms(), f"{ratio.median_s:.3f} [{ratio.p25_s:.3f} {ratio.p75_s:.3f}]"))
    print(aligned(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
