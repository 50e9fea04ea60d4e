"""The shortest possible time of an all-reduce, which memory bandwidth limits."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from syncline.collectives import InvalidArgumentError

_BACKEND = "floor"


@dataclass(frozen=True)
class Floor:
    """The shortest possible time of an all-reduce: a rank's time for its share of the additions and copies.

    Attributes:
        points: at least one pair of a tensor's size in bytes and the seconds for this size, in ascending order.
    """

    points: tuple[tuple[float, float], ...]

    def seconds(self, nbytes: float) -> float:
        """Return the shortest possible seconds of an all-reduce of this size.

        Between two measured sizes, interpolate linearly. Outside of the measured sizes, the time is proportional to the size.
        """
        sizes = [size for size, _ in self.points]
        place = bisect_left(sizes, nbytes)
        if 0 < place < len(sizes):
            (x0, y0), (x1, y1) = self.points[place - 1 : place + 1]
            return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)
        size, seconds = self.points[0 if place == 0 else -1]
        return seconds * nbytes / size

    def share(self, sizes: Iterable[float], seconds: float) -> float:
        """Return the shortest possible time of all-reduces of these sizes, divided by the measured time `seconds`."""
        return sum(map(self.seconds, sizes)) / seconds


def read_floor(path: Path, ranks: int) -> Floor:
    """Return the shortest possible times of all-reduces (the floor) from a file of `syncline bench --json`.

    Args:
        path: the file.
        ranks: the number of ranks of the trace. The floor depends on this number.

    Raises:
        InvalidArgumentError: the file has another format, has no floor, or was measured on another number of ranks.
    """
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        rows, measured = figures["measurements"], figures["environment"]["world_size"]
        points = {
            float(row["size_bytes"]): float(row["median_s"])
            for row in rows
            if (row["collective"], row["dtype"], row["backend"]) == ("all_reduce", "float32", _BACKEND) and "median_s" in row
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"--floor: {path} is no file of `syncline bench --json`: {type(error).__name__}: {error}"
        ) from error
    command = f"mpirun -n {ranks} syncline bench --sizes 64K 64M --backends {_BACKEND} --json {path}"
    if not points:
        raise InvalidArgumentError(
            f"--floor: expected all-reduces of the backend {_BACKEND} in {path}, found none; measure with {command}"
        )
    if measured != ranks:
        raise InvalidArgumentError(
            f"--floor: expected measurements on {ranks} rank(s), as many as the trace has, found {measured} in {path}; measure "
            f"with {command}"
        )
    return Floor(tuple(sorted(points.items())))
