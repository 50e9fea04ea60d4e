"""Steps by bucket size, from one parameter a bucket to all in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from syncline.collectives import ProcessGroup

from . import picture
from .cases import Case
from .contenders import ALONE, Wrap, alone, trainers
from .report import Report
from .summary import Summary
from .timing import interleaved

CAPS_MB = {"one each": 2.0**-20, "0.25": 0.25, "1": 1.0, "5": 5.0, "25": 25.0, "all in one": 2.0**20}
"""Labels and sizes in MiB."""

ByCap = dict[str, dict[str, Summary]]


def sweep(
    case: Case, makers: dict[str, Callable[..., Wrap]], group: ProcessGroup, rounds: int, caps: dict[str, float] = CAPS_MB
) -> ByCap:
    """Measure each contender with each bucket size, all in one round. A collective.

    Args:
        case: the model.
        makers: for each contender what makes a DDP with given options.
        group: of the ranks.
        rounds: steps of each.
        caps: labels and sizes in MiB.

    Returns:
        For each contender the steps by label, and the unsynchronised ones under every label.
    """
    wraps: dict[tuple[str, str], Wrap] = {
        (name, label): make(bucket_cap_mb=cap) for label, cap in caps.items() for name, make in makers.items()
    }
    joined = {f"{name}/{label}": wrap for (name, label), wrap in wraps.items()}
    taken = interleaved(trainers(case, {**joined, ALONE: alone}), group, rounds)
    found = {name: Summary.of([step.total_s for step in steps]) for name, steps in taken.items()}
    by_cap = {name: {label: found[f"{name}/{label}"] for label in caps} for name in makers}
    return {**by_cap, ALONE: dict.fromkeys(caps, found[ALONE])}


def show(case: Case, found: ByCap, report: Report, part: str, *, picture_name: str | None = None) -> None:
    """A table and a picture of a sweep; the picture is called like the part, unless it has a name of its own."""
    labels = list(next(iter(found.values())))
    rows = [[label, *(found[name][label].in_ms() for name in found)] for label in labels]
    report.table(part, f"{case.name}, ms by bucket size in MiB: median [quartiles]", ["bucket", *found], rows)
    picture.lines(report.picture(picture_name or part), case.name, "bucket size [MiB]", found)


def as_figures(found: ByCap) -> dict[str, dict[str, dict[str, float]]]:
    """A sweep's figures, for JSON."""
    return {name: {label: asdict(summary) for label, summary in points.items()} for name, points in found.items()}
