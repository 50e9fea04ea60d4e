"""The cost of `Elastic` while no rank is lost: steps with and without it, on two ranks over Gloo.

    python3 tools/dev.py bench elastic [--rounds 40] [--json PATH]

Starts two processes itself. The contenders are the same model in the same processes, and take turns of a few steps. A ratio
compares neighbouring turns. The output has its median, the possible error of the median, and its quartiles. A second contender
without `Elastic` ("of the same") shows the noise: its ratio should be 1. A second table has the cost of each part alone: wall
time and processor time, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from syncline.collectives.cli.bench.results import aligned
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
        found: dict[str, Any] = json.loads((folder / "steps.json").read_text())
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    rows: list[tuple[str, ...]] = [
        ("model", "without, ms", "with Elastic, ms", "ratio", "of the same", "processor time", "of the same")
    ]
    parts: list[tuple[str, ...]] = [("model", "agreement, us", "processor", "snapshot, us", "processor")]
    for case, of in found.items():
        ratios = [_ratio(of[name][kind], of["plain"][kind]) for kind in ("wall_s", "cpu_s") for name in ("elastic", "again")]
        rows.append((case, *(Summary.of(of[name]["wall_s"]).in_ms() for name in ("plain", "elastic")), *ratios))
        parts.append((case, *(f"{1e6 * part_s:.0f}" for name in ("agreement", "snapshot") for part_s in of["parts"][name])))
    print(aligned(rows))
    print(aligned(parts))
    return 0


def _ratio(times_s: Sequence[float], others_s: Sequence[float]) -> str:
    return Summary.of([one / other for one, other in zip(times_s, others_s, strict=True)]).as_ratio()


if __name__ == "__main__":
    sys.exit(main())
