"""The report: what was trained, on what, how fast, and whether it is exact."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gradient_check import TOLERANCE

PACKAGES = ("torch", "mpi4py", "scikit-learn", "syncline-collectives", "syncline-reducer", "syncline-ddp")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is printed, and written as JSON under the same names."""

    backend: str
    library: str
    ranks: int
    nodes: int
    threads_per_rank: int
    epochs: int
    global_batch_size_images: int
    training_time_s: float
    test_accuracy_percent: float
    images_per_second: float
    step_time_median_ms: float
    waiting_share_of_step_percent: float
    replicas_bitwise_identical: bool
    first_gradient_largest_relative_difference: float
    versions: dict[str, str]

    def is_exact(self) -> bool:
        """Whether the replicas are equal, and the gradient is that of a single process up to rounding."""
        return self.replicas_bitwise_identical and self.first_gradient_largest_relative_difference < TOLERANCE

    def table(self) -> str:
        """Two columns of text."""
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def _rows(self) -> list[tuple[str, str]]:
        difference = self.first_gradient_largest_relative_difference
        return [
            ("backend", self.library),
            (
                "ranks",
                f"{_count(self.ranks, 'rank')} on {_count(self.nodes, 'node')}, {_count(self.threads_per_rank, 'thread')} each",
            ),
            (
                "training",
                f"{_count(self.epochs, 'epoch')} in {self.training_time_s:.1f} s, batches of {self.global_batch_size_images}",
            ),
            ("test accuracy", f"{self.test_accuracy_percent:.1f} %"),
            ("images per second", f"{self.images_per_second:,.0f}"),
            ("step time, median", f"{self.step_time_median_ms:.2f} ms"),
            ("of it waiting", f"{self.waiting_share_of_step_percent:.1f} %"),
            ("replicas identical", "yes, bit by bit" if self.replicas_bitwise_identical else "NO"),
            ("gradient difference", f"{difference:.1e} {'(rounding)' if difference < TOLERANCE else 'TOO LARGE'}"),
        ]


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that matter."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
