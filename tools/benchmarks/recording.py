"""The cost of recording a step: recorded steps compared with others, and the added processor time.

The cost of recording depends on the number of buckets, not on the length of a step. So its processor time is measured where it
is visible: on one rank, in almost empty steps with the same number of buckets. Blocks of recorded and other steps take turns.
"""

from __future__ import annotations

import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from syncline.collectives import ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel
from syncline.ddp.tracing.part import part_path, read_part, step_line

from .cases import Case
from .session import shared_folder
from .summary import Summary
from .timing import Phases, interleaved
from .trainer import Trainer

PLAIN, AGAIN, RECORDED = "not recorded", "not recorded, again", "recorded"
_BLOCK_STEPS = 25


@dataclass(frozen=True)
class Added:
    """The cost that recording adds to a step.

    Attributes:
        calls: calls of Python and C functions in a step; the same in each step.
        busy_s: processor seconds in a step: the difference of the medians of two neighbouring blocks.
        write_s: seconds to write a step to the file, which is done once a second.
    """

    calls: int
    busy_s: Summary
    write_s: float

    @property
    def total_s(self) -> float:
        """Processor seconds for a step."""
        return self.busy_s.median_s + self.write_s


@dataclass(frozen=True)
class Recorded:
    """One case.

    Attributes:
        steps_s: each contender's seconds, by round.
        buckets: the number of buckets in a step.
        added: the cost added to a step with this number of buckets.
    """

    steps_s: dict[str, list[float]]
    buckets: int
    added: Added

    def over_plain(self, name: str) -> Summary:
        """Ratios of steps of the same round."""
        return Summary.of([one / plain for one, plain in zip(self.steps_s[name], self.steps_s[PLAIN], strict=True)])

    @property
    def share(self) -> float:
        """The added processor time as a share of a step."""
        return self.added.total_s / Summary.of(self.steps_s[PLAIN]).median_s


def measure(case: Case, group: ProcessGroup, rounds: int) -> Recorded:
    """Each recorded step is a trace of its own, because a running trace sees the calls of all models. A collective."""
    model, batch = case.model(), case.batch()
    wrapped = {name: DistributedDataParallel(copy.deepcopy(model), process_group=group) for name in (PLAIN, AGAIN, RECORDED)}
    steps: dict[str, Callable[[], Phases]] = {name: Trainer(one, case, batch).step for name, one in wrapped.items()}
    with shared_folder(group) as folder:
        step = steps[RECORDED]

        def recorded() -> Phases:
            with wrapped[RECORDED].trace(folder):
                group.barrier()
                return step()

        taken = interleaved({**steps, RECORDED: recorded}, group, rounds)
    buckets = len(wrapped[PLAIN].iteration_statistics().buckets)
    return Recorded(
        {name: [one.total_s for one in ones] for name, ones in taken.items()}, buckets, measure_added(buckets, rounds)
    )


def measure_added(buckets: int, blocks: int) -> Added:
    """Measure this process alone, in a group of one rank."""
    (added,) = run_ranks(1, _measure_added, buckets, blocks)
    return added


def _measure_added(group: ProcessGroup, buckets: int, blocks: int) -> Added:
    layers = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(buckets)))
    model = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=1 / 2**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    value = torch.ones(1, 1)

    def step() -> None:
        optimizer.zero_grad()
        model(value).sum().backward()
        optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        recorded: Callable[[], AbstractContextManager[object]] = lambda: model.trace(folder)  # noqa: E731
        # The wrapper looks for changes of the model after 1, 2, 4, 8 ... steps. Count the calls of the 7th and the 10th step.
        for _ in range(4):
            step()
        calls = _calls(step, recorded) - _calls(step, nullcontext)
        busy_s = [_busy_s(step, recorded) - _busy_s(step, nullcontext) for _ in range(blocks)]
        return Added(calls, Summary.of(busy_s), _write_s(Path(folder)))


def _calls(step: Callable[[], None], context: Callable[[], AbstractContextManager[object]]) -> int:
    """Calls in the third step inside the context, on this thread."""
    count = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with context():
        step()
        step()
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
    return count


def _busy_s(step: Callable[[], None], context: Callable[[], AbstractContextManager[object]]) -> float:
    """Processor seconds for a step, in the median of a block."""
    times = []
    with context():
        step()
        for _ in range(_BLOCK_STEPS):
            began = time.process_time()
            step()
            times.append(time.process_time() - began)
    return statistics.median(times)


def _write_s(folder: Path) -> float:
    """Processor seconds to turn a step of the last trace into a line of the file."""
    steps = read_part(part_path(folder, 0)).steps
    began = time.process_time()
    for step in steps:
        step_line(step)
    return (time.process_time() - began) / len(steps)
