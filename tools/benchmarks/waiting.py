"""How ranks wait for one another: what gives the core away, at nodes that are full and over-full.

    python3 tools/dev.py bench waiting                # a rank on each core, if there are two
    python3 tools/dev.py bench --ranks 4 waiting      # two on each

One DDP model for each case takes its steps with one policy after the other, in turn. The policies are what a thread does
between two looks at whether the others are there, once it has looked a few times in vain: `yield` (sched_yield, which is ours),
`spin` (nothing), `sleep` (50 us).
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from syncline.collectives import ProcessGroup
from syncline.collectives.transports.mpi import library

from . import picture, session
from .cases import all_cases
from .contenders import ours
from .report import Report
from .summary import Summary, as_times
from .timing import Phases, Step, interleaved
from .trainer import Trainer

OURS = "yield"
POLICIES: dict[str, Callable[[], None]] = {
    OURS: os.sched_yield,
    "spin": lambda: None,
    "sleep": lambda: time.sleep(50e-6),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank of the job calls it."""
    return session.play("waiting", __doc__, {"steps": _steps}, arguments)


def _steps(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    found: dict[str, dict[str, Summary]] = {}
    for case in all_cases(session.scale(options)):
        trainer = Trainer(ours(group)(copy.deepcopy(case.model())), case, case.batch())
        steps = {name: with_policy(policy, trainer.step) for name, policy in POLICIES.items()}
        taken = interleaved(steps, group, options.steps)
        found[case.name] = {name: Summary.of([step.total_s for step in taken[name]]) for name in taken}
        base_s = found[case.name][OURS].median_s
        rows = [[name, step.in_ms(), as_times(step.median_s / base_s)] for name, step in found[case.name].items()]
        report.table("steps", f"{case.name}, ms: median [quartiles]", ["policy", "step", f"over {OURS}"], rows)
    report.keep("steps", {case: {name: asdict(step) for name, step in steps.items()} for case, steps in found.items()})
    picture.bars(report.picture("steps"), f"steps by how ranks wait, {group.size} ranks", found)


def with_policy(policy: Callable[[], None], step: Step) -> Step:
    """A step during which this process waits in that way."""

    def run() -> Phases:
        usual, library.yield_cpu = library.yield_cpu, policy
        try:
            return step()
        finally:
            library.yield_cpu = usual

    return run


if __name__ == "__main__":
    sys.exit(main())
