"""Figures as they are shown and kept: tables on rank 0, one JSON file."""

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
    """What rank 0 says; the others' reports are silent.

    Args:
        benchmark: its name, which pictures begin with.
        options: with `json` and `plot`.
        group: what was measured on. Making a report is a collective.
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
        """Print and keep whether a target is reached; `where` says on what the figure was seen, or why it was not."""
        verdict = target.verdict(seen, where) + self._caveat
        self._kept["verdicts"].append(verdict)
        self._say(verdict)

    def judge_worst(self, target: Target, seen: Iterable[tuple[float, str]]) -> None:
        """The same of the worst of several figures, each with where it was seen."""
        self.judge(target, *target.worst(seen))

    def keep(self, part: str, figures: Any) -> None:
        """Put the figures of a part into the JSON file, which is written anew each time: an interrupted run leaves some."""
        self._kept[part] = figures
        if self._speaks and self._json is not None:
            self._json.write_text(json.dumps(self._kept, indent=1) + "\n")

    def picture(self, part: str) -> Path | None:
        """Where to draw a part; None where nobody asked, or on another rank."""
        return self._folder / f"{self._benchmark}-{part}.png" if self._speaks and self._folder is not None else None

    def _say(self, text: str) -> None:
        if self._speaks:
            print(text, flush=True)


def _caveat(environment: Mapping[str, Any]) -> str:
    """Why a verdict means less than it says; nothing if it does not."""
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
