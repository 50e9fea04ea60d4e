"""The project's targets, and whether they were reached. Settings: two ranks on two cores, one thread each; ratios of medians of
one run. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A bound on a figure.

    Attributes:
        what: the name of the bounded figure.
        bound: the bound.
        unit: the figure's unit.
        is_least: whether the bound is the smallest allowed figure; else it is the largest.
    """

    what: str
    bound: float
    unit: str = "times"
    is_least: bool = False

    def holds(self, seen: float) -> bool:
        """Whether a figure is on the right side of the bound."""
        return seen >= self.bound if self.is_least else seen <= self.bound

    def worst(self, seen: Iterable[tuple[float, str]]) -> tuple[float | None, str]:
        """The figure that is nearest to the wrong side, or beyond it, with the place where it was seen."""
        return (min if self.is_least else max)(seen, key=lambda figure: figure[0], default=(None, ""))

    def verdict(self, seen: float | None, where: str = "") -> str:
        """One line: wanted, seen, held or missed."""
        wanted = f"target: {self.what}: wanted {'at least' if self.is_least else 'at most'} {self.bound:g} {self.unit}"
        if seen is None:
            return f"{wanted}, not seen{_in_brackets(where)}"
        return f"{wanted}, seen {seen:.3g}{_in_brackets(where)}: {'held' if self.holds(seen) else 'missed'}"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _least(what: str, bound: float) -> Target:
    return Target(what, bound, is_least=True)


IN_WINDOW_OVER_GLOO = _least("all-reduce of 25M in the window: faster than torch's Gloo", 8)
IN_WINDOW_OVER_RAW = _least("all-reduce of 4M to 64M in the window: faster than raw mpi4py", 2.5)
IN_WINDOW_OVER_FLOOR = Target("all-reduce of 25M in the window: over the memory floor", 1.3)
SMALL_ABOVE_RAW = Target("all-reduce up to 16K: slower than raw mpi4py by", 10, "us")
SMALL_OVER_GLOO = _least("all-reduce up to 16K: faster than torch's Gloo", 20)
STEP = Target("step, each case: over torch's DDP", 1.0)
STEP_MEAN = Target("step, geometric mean over the cases: over torch's DDP", 0.8)
EXPOSED = Target("exposed communication, geometric mean: over torch's DDP", 0.40)
OVERHEAD = {
    graph: Target(f"reducer's cost per parameter, {graph}: over torch's", bound)
    for graph, bound in (("dynamic", 1.5), ("static", 1.3), ("find-unused", 0.95))
}
REALISTIC = Target("time added per parameter, real models, one rank, geometric mean: over torch's", 1.0)
MEMORY = Target("peak memory with gradient_as_bucket_view: over torch's DDP", 1.0)
WIRE = Target("bytes on the wire: over the minimum", 1.05)
HOSTS_OVER_RAW = Target("all-reduce across hosts: over the MPI's own", 1.0)
SHARED_HOSTS_OVER_RAW = Target("all-reduce across hosts of several ranks: over the MPI's own", 0.8)
POWER_SGD_FASTER = _least("step with PowerSGD rank 1: faster than without compression", 5)
BUCKETED = _least("step with buckets: faster than with one reduction per parameter", 2)
SLEEPING_STEP = Target("step of sleeping layers: over torch's DDP", 1.0)
EXPOSED_OVER_FORCED = Target("exposed communication of sleeping layers: over what the network's bandwidth forces", 1.2)
TUNED_OVER_BEST = Target('step with bucket_cap_mb="auto": over the best fixed size', 1.05)
TUNED_OVER_DEFAULT = Target('step with bucket_cap_mb="auto": over the default', 1.02)
RECORDING = Target("step that is recorded, worst case: over one that is not", 1.01)
RECORDING_BUSY = Target("processor's time that recording adds, worst case: of a step", 1, "%")
