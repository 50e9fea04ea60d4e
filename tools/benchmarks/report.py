"""Output of figures: tables on rank 0, and one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from syncline.collectives import ProcessGroup, placement_of
from syncline.collectives.cli.bench.results import aligned

from .targets import Target


class Report:
    """Rank 0's output; the reports of other ranks are silent.

    Args:
        benchmark: its name; names of pictures begin with it.
        options: with `json` and `plot`.
        group: the measured group. Making a report is a collective.
    """

    def __init__(self, benchmark: str, options: argparse.Namespace, group: ProcessGroup) -> None:
        self._benchmark = benchmark
        self._json: Path | None = options.json
        self._folder: Path | None = options.plot
        self._speaks = group.rank == 0
        self._kept: dict[str, Any] = {"environment": _environment(group, options), "verdicts": []}
        self._caveat = _caveat(self._kept["environment"])
        self._say(", ".join(f"{name} {value}" for name, value in self._kept["environment"].items()))

    def table(self, part: str, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table."""
        self._say(f"\n{part}: {title}\n{aligned([tuple(head), *map(tuple, rows)])}")

    def line(self, text: str) -> None:
        """Print a line."""
        self._say(text)

    def judge(self, target: Target, seen: float | None, where: str = "") -> None:
        """Print and keep whether a target is reached. `where` says where the figure was seen, or why it was not."""
        verdict = target.verdict(seen, where) + self._caveat
        self._kept["verdicts"].append(verdict)
        self._say(verdict)

    def judge_worst(self, target: Target, seen: Iterable[tuple[float, str]]) -> None:
        """Judge the worst of several figures, each with the place where it was seen."""
        self.judge(target, *target.worst(seen))

    def keep(self, part: str, figures: Any) -> None:
        """Add a part's figures to the JSON file. The file is written each time, so an interrupted run leaves some."""
        self._kept[part] = figures
        if self._speaks and self._json is not None:
            self._json.write_text(json.dumps(self._kept, indent=1) + "\n")

    def picture(self, part: str) -> Path | None:
        """The path for a part's picture; None if none is wanted, or on another rank."""
        return self._folder / f"{self._benchmark}-{part}.png" if self._speaks and self._folder is not None else None

    def _say(self, text: str) -> None:
        if self._speaks:
            print(text, flush=True)


def _caveat(environment: Mapping[str, Any]) -> str:
    """Why a verdict is less reliable here; empty if it is reliable."""
    if environment["quick"]:
        return "; with --quick that means nothing"
    if environment["world_size"] > environment["nodes"] * environment["cores"]:
        return "; but ranks share cores"
    return ""


def _environment(group: ProcessGroup, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "group": group.describe(),
        "world_size": group.size,
        "nodes": placement_of(group).nodes,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "machine": platform.machine(),
        "quick": options.quick,
    }
