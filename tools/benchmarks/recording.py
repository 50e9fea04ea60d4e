"""What `model.trace` costs: steps that are recorded beside steps that are not."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from syncline.collectives import ProcessGroup
from syncline.ddp import DistributedDataParallel

from .cases import Case
from .session import shared_folder
from .summary import Summary
from .timing import interleaved
from .trainer import Trainer

PLAIN, AGAIN, RECORDED = "not recorded", "not recorded, again", "recorded"


@dataclass(frozen=True)
class Recorded:
    """One case.

    Attributes:
        steps_s: each contender's seconds, by round.
    """

    steps_s: dict[str, list[float]]

    def over_plain(self, name: str) -> Summary:
        """Ratios of steps of the same round."""
        return Summary.of([one / plain for one, plain in zip(self.steps_s[name], self.steps_s[PLAIN], strict=True)])


def measure(case: Case, group: ProcessGroup, rounds: int) -> Recorded:
    """All steps of one contender are recorded, those of two are not. A collective."""
    model, batch = case.model(), case.batch()
    wrapped = {name: DistributedDataParallel(copy.deepcopy(model), process_group=group) for name in (PLAIN, AGAIN, RECORDED)}
    with shared_folder(group) as folder, wrapped[RECORDED].trace(folder):
        taken = interleaved({name: Trainer(module, case, batch).step for name, module in wrapped.items()}, group, rounds)
    return Recorded({name: [step.total_s for step in steps] for name, steps in taken.items()})
