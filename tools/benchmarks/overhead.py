"""The cost of DDP for each parameter on one rank: ours and torch's side by side.

    python3 tools/dev.py bench overhead [--parts realistic static] [--steps 60] [--json PATH] [--plot FOLDER]

One process, one rank, one thread. All contenders train copies of one model, and take turns. A contender's cost is its step
(forward, backward, zero_grad) minus that of the bare module in the same round, for each parameter: in wall time, and in
processor time of all threads. Each is measured with and without gradient_as_bucket_view.

The part `realistic` shows the cost for users: models of real sizes, everything that DDP does. The others show the cost of the
reducer alone: many tiny parameters, a communication hook that does nothing, for each kind of graph: dynamic, static, and with
find_unused_parameters.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch

from syncline.collectives import ProcessGroup
from syncline.hooks import noop_hook

from . import picture, session
from .cases import realistic_cases
from .contenders import ALONE, OURS, VIEWS, counterpart, with_and_without_views, with_hook
from .report import Report
from .summary import GeometricMean, Summary, as_times, ratio_of_costs
from .targets import OVERHEAD, REALISTIC
from .timing import interleaved

GRAPHS: dict[str, dict[str, bool]] = {
    "dynamic": {},
    "static": {"static_graph": True},
    "find-unused": {"find_unused_parameters": True},
}
NUMEL = 16
CLOCKS = ("wall", "processor")


class Cost(NamedTuple):
    """The cost of one step, in seconds; processor time is that of all threads."""

    wall_s: float
    processor_s: float

    @property
    def total_s(self) -> float:
        """Wall time."""
        return self.wall_s


class ManySmall(torch.nn.Module):
    """Many small parameters, with almost no computation."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.pieces = torch.nn.ParameterList(torch.randn(NUMEL) for _ in range(count))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.pieces)).sum() * inputs


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in one process."""
    return session.play("overhead", __doc__, PARTS, arguments)


def _measure(graph: str, options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    count = session.scale(options).many
    taken = interleaved(_steps(graph, count, group), group, options.steps)
    found = {
        clock: costs({name: [getattr(cost, f"{clock}_s") for cost in taken[name]] for name in taken}, count) for clock in CLOCKS
    }
    ratios = {(clock, name): ratio_to_torchs(found[clock], name) for clock in CLOCKS for name in found[clock]}
    rows = [
        [name, *(cell for clock in CLOCKS for cell in (found[clock][name].in_us(), as_times(ratios[clock, name])))]
        for name in taken
        if name != ALONE
    ]
    head = ["contender", "wall", "over torch", "processor", "over torch"]
    report.table(graph, f"us for each of {count} parameters: median [quartiles]", head, rows)
    judged = [(ratio, f"{name}; {clock}") for (clock, name), ratio in ratios.items() if name.startswith(OURS)]
    report.judge_worst(OVERHEAD[graph], [(ratio, where) for ratio, where in judged if ratio is not None])
    report.keep(graph, {clock: {name: asdict(cost) for name, cost in found[clock].items()} for clock in CLOCKS})
    shown = {f"{graph}, {clock}": found[clock] for clock in CLOCKS}
    picture.bars(report.picture(graph), f"the reducer's cost, {count} parameters", shown, picture.US_PER_PARAMETER)


def _steps(graph: str, count: int, group: ProcessGroup) -> dict[str, Callable[[], Cost]]:
    model, data = ManySmall(count), torch.tensor(2.0)
    wraps = with_and_without_views(group, **GRAPHS[graph])
    hooked = {name: with_hook(wrap, lambda _: None, noop_hook) for name, wrap in wraps.items() if name != ALONE}
    return {name: _step(wrap(copy.deepcopy(model)), data) for name, wrap in {**hooked, ALONE: wraps[ALONE]}.items()}


def _step(
    module: torch.nn.Module,
    data: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda output, _: output,
) -> Callable[[], Cost]:
    def step() -> Cost:
        wall_s, processor_s = time.perf_counter(), time.process_time()
        loss(module(data), data).backward()  # type: ignore[no-untyped-call]
        module.zero_grad()
        return Cost(time.perf_counter() - wall_s, time.process_time() - processor_s)

    return step


def costs(taken_s: Mapping[str, Sequence[float]], count: int) -> dict[str, Summary]:
    """The cost of each contender's reducer for each of `count` parameters, from seconds of each step. A pure function."""
    alone_s = [step_s / count for step_s in taken_s[ALONE]]
    return {
        name: Summary.of_difference([step_s / count for step_s in steps_s], alone_s)
        for name, steps_s in taken_s.items()
        if name != ALONE
    }


def ratio_to_torchs(found: Mapping[str, Summary], name: str) -> float | None:
    """A contender's cost divided by its counterpart's; None if either is lost in noise. A pure function."""
    return ratio_of_costs(found[name], found[counterpart(name)])


def _measure_realistic(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    ratios: dict[str, dict[str, float | None]] = {OURS: {}, OURS + VIEWS: {}}
    rows, kept = [], {}
    for case in realistic_cases(session.scale(options)):
        model, batch = case.model(), case.batch()
        count = sum(1 for _ in model.parameters())
        wraps = with_and_without_views(group)
        steps = {name: _step(wrap(copy.deepcopy(model)), batch, case.loss) for name, wrap in wraps.items()}
        taken = interleaved(steps, group, options.steps)
        found = costs({name: [cost.wall_s for cost in taken[name]] for name in taken}, count)
        for name in ratios:
            ratios[name][case.name] = ratio_to_torchs(found, name)
        rows += [[case.name, name, found[name].in_us(), as_times(ratio_to_torchs(found, name))] for name in found]
        kept[case.name] = {name: asdict(cost) for name, cost in found.items()}
    report.table("realistic", "us for each parameter: median [quartiles]", ["model", "contender", "wall", "over torch"], rows)
    for name, known in ratios.items():
        mean = GeometricMean.of(known)
        report.judge(REALISTIC, mean.value, f"{name}; {mean.basis()}")
    report.keep("realistic", kept)


PARTS: dict[str, session.Part] = {
    "realistic": _measure_realistic,
    **{graph: partial(_measure, graph) for graph in GRAPHS},
}

if __name__ == "__main__":
    sys.exit(main())
