"""Steps with the buckets that `bucket_cap_mb="auto"` has chosen, compared with fixed sizes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from syncline.collectives import ProcessGroup
from syncline.ddp import DistributedDataParallel

from .cases import Case
from .report import Report
from .summary import Summary
from .targets import TUNED_OVER_BEST, TUNED_OVER_DEFAULT
from .timing import interleaved
from .trainer import Trainer

AUTO, DEFAULT, AGAIN = "auto", "default", "default, again"
"""The default stands twice: what its two steps differ by is what two equal contenders differ by on this machine."""
CAPS_MB = {"0.5": 0.5, "1": 1.0, "4": 4.0, "8": 8.0, DEFAULT: None, "100": 100.0}
_MOST_STEPS = 20


@dataclass(frozen=True)
class Tuned:
    """One case.

    Attributes:
        chosen_mb: the choice of "auto": sizes of the first bucket and of the others.
        steps_s: seconds of each contender in each round.
    """

    chosen_mb: list[float] | None
    steps_s: Mapping[str, Sequence[float]]

    def over(self, name: str, other: str, first: int = 0, every: int = 1) -> Summary:
        """The ratios of two contenders' steps in the same round, for each `every`-th round from `first` on."""
        pairs = zip(self.steps_s[name][first::every], self.steps_s[other][first::every], strict=True)
        return Summary.of([own / others for own, others in pairs])

    @property
    def best(self) -> str:
        """The fixed size with the smallest median over the even rounds. Ratios to it come from the odd rounds.

        The smallest of several medians is partly luck, and luck does not count in other rounds.
        """
        return min(CAPS_MB, key=lambda name: Summary.of(self.steps_s[name][::2]).median_s)

    def over_best(self) -> Summary:
        """The ratios of "auto" to the best fixed size."""
        return self.over(AUTO, self.best, 1, 2)


def measure(case: Case, group: ProcessGroup, rounds: int) -> Tuned:
    """Tune first, without other steps between; then all take turns. A collective; at least 2 rounds."""
    model, batch = case.model(), case.batch()

    def trainer(cap_mb: float | str | None) -> Trainer:
        return Trainer(DistributedDataParallel(copy.deepcopy(model), process_group=group, bucket_cap_mb=cap_mb), case, batch)

    auto = trainer("auto")
    chosen_mb = _tune(auto)
    trained = {AUTO: auto, AGAIN: trainer(CAPS_MB[DEFAULT]), **{name: trainer(cap_mb) for name, cap_mb in CAPS_MB.items()}}
    taken = interleaved({name: one.step for name, one in trained.items()}, group, max(2, rounds))
    return Tuned(chosen_mb, {name: [step.total_s for step in steps] for name, steps in taken.items()})


def _tune(trainer: Trainer) -> list[float] | None:
    """The chosen sizes; None if nothing was chosen."""
    for _ in range(_MOST_STEPS):
        trainer.step()
        chosen_mb: Any = trainer.module.tuned_bucket_cap_mb
        if chosen_mb is not None:
            return list(chosen_mb)
    return None


def compare(part: str, cases: Sequence[Case], group: ProcessGroup, rounds: int, report: Report) -> None:
    """Measure each case; show, judge and keep it as a part of the report. A collective."""
    figures: dict[str, Any] = {}
    for case in cases:
        found = measure(case, group, rounds)
        figures[case.name] = {"chosen_mb": found.chosen_mb, "best": found.best, "steps_s": found.steps_s}
        rows = [
            [name, Summary.of(steps_s).in_ms(), found.over(name, DEFAULT).as_ratio()] for name, steps_s in found.steps_s.items()
        ]
        report.table(part, f"{case.name}, by MiB: median [quartiles]", ["buckets", "step, ms", "over the default"], rows)
        over_best, over_default = found.over_best(), found.over(AUTO, DEFAULT)
        chosen = "nothing" if found.chosen_mb is None else "{:g} MiB, the first {:g}".format(*reversed(found.chosen_mb))
        report.line(
            f"auto chose {chosen}; over the best of the even rounds, {found.best}, in the odd ones: {over_best.as_ratio()}"
        )
        figures[case.name] |= {"over_best": asdict(over_best), "over_default": asdict(over_default)}
        report.judge(TUNED_OVER_BEST, over_best.median_s, case.name)
        report.judge(TUNED_OVER_DEFAULT, over_default.median_s, case.name)
        report.keep(part, figures)
