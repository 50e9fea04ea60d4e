"""How ranks wait for one another: what gives the core away, at nodes that are full and over-full.

    python3 tools/dev.py bench waiting                # a rank on each core, if there are two
    python3 tools/dev.py bench --ranks 4 waiting      # two on each

One DDP model for each case takes its steps with one policy after the other, in turn. The policies are what a thread does
between two looks at whether the others are there, once it has looked a few times in vain: `ours` (it yields, and sleeps after
`spin_s`), `yield` (sched_yield for ever), `spin` (nothing), `sleep` (at once).
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from syncline.collectives import ProcessGroup
from syncline.collectives.backends.mpi import waiting
from syncline.collectives.startup.settings import DEFAULT_SPIN_S

from . import picture, session
from .cases import all_cases
from .contenders import ours
from .report import Report
from .summary import Summary, as_times
from .timing import Phases, Step, interleaved
from .trainer import Trainer

OURS = "ours"
# For how long ranks look before they sleep, and what they do meanwhile.
POLICIES: dict[str, tuple[float, Callable[[], None]]] = {
    OURS: (DEFAULT_SPIN_S, os.sched_yield),
    "yield": (math.inf, os.sched_yield),
    "spin": (math.inf, lambda: None),
    "sleep": (0.0, os.sched_yield),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank of the job calls it."""
    return session.play("waiting", __doc__, {"steps": _steps}, arguments)


def _steps(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    found: dict[str, dict[str, Summary]] = {}
    for case in all_cases(session.scale(options)):
        trainer = Trainer(ours(group)(copy.deepcopy(case.model())), case, case.batch())
        steps = {name: with_policy(*policy, trainer.step) for name, policy in POLICIES.items()}
        taken = interleaved(steps, group, options.steps)
        found[case.name] = {name: Summary.of([step.total_s for step in taken[name]]) for name in taken}
        base_s = found[case.name][OURS].median_s
        rows = [[name, step.in_ms(), as_times(step.median_s / base_s)] for name, step in found[case.name].items()]
        report.table("steps", f"{case.name}, ms: median [quartiles]", ["policy", "step", f"over {OURS}"], rows)
    report.keep("steps", {case: {name: asdict(step) for name, step in steps.items()} for case, steps in found.items()})
    picture.bars(report.picture("steps"), f"steps by how ranks wait, {group.size} ranks", found)


def with_policy(spin_s: float, yield_cpu: Callable[[], None], step: Step) -> Step:
    """A step during which this process waits in that way."""

    def run() -> Phases:
        usual, waiting.yield_cpu = waiting.yield_cpu, yield_cpu
        waiting.spin_for(spin_s)
        try:
            return step()
        finally:
            waiting.yield_cpu = usual
            waiting.spin_for(DEFAULT_SPIN_S)

    return run


if __name__ == "__main__":
    sys.exit(main())
