"""Collectives of this checkout beside those of an earlier commit, both loaded into the same processes and called in turns.

    python3 tools/dev.py bench versions 74ed058           # the commit before collectives were redesigned
    python3 tools/dev.py bench --mpi openmpi versions HEAD~20 --kinds broadcast --bytes 4096 --turns 20

A turn is a row of calls by each version, on memory of its own, in plain memory and in a window. Shown are a call's time with
the commit's code and with today's, and the ratio of the same turn: medians with quartiles, on rank 0.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import session
from .summary import Summary
from .timing import order_of_round

ROOT = Path(__file__).parents[2]
SOURCES = Path("packages", "collectives", "src")
COMMIT, TODAY = "commit", "today"
PLACES = ("plain", "window")
KINDS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
LEAST_WINDOW_BYTES = 4096
BYTES = [4, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20]
_CALLS_BYTES, _LEAST_CALLS, _MOST_CALLS, _WARM_UP = 20_000_000, 10, 200, 20
_NAMESPACE = "syncline"


class Version:
    """The modules of one version of the collectives, and a group that they made.

    Args:
        sources: the folder that holds `syncline`; None: what is imported already.
    """

    def __init__(self, sources: Path | None) -> None:
        self._modules: dict[str, ModuleType] = {} if sources else _take_modules()
        if sources is not None:
            sys.path.insert(0, str(sources))
            importlib.invalidate_caches()
        try:
            with self.imported():
                self._collectives: Any = importlib.import_module(f"{_NAMESPACE}.collectives")
                self.group = self._collectives.init_process_group("mpi")
        finally:
            if sources is not None:
                sys.path.remove(str(sources))

    @contextmanager
    def imported(self) -> Iterator[None]:
        """What imports `syncline` meanwhile gets this version."""
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            self._modules = _take_modules()

    def call(self, kind: str, nbytes: int, place: str) -> Callable[[], object]:
        """A call of a collective on float32, as scripts write it; `nbytes` of each rank."""
        numel = max(1, nbytes // 4)
        make = self.group.allocate if place == "window" else torch.zeros
        tensor = make(numel, dtype=torch.float32).zero_()
        function = getattr(self._collectives, kind)
        if kind == "broadcast":
            return functools.partial(function, tensor, src=0)
        if kind == "all_reduce":
            return functools.partial(function, tensor)
        block = make(numel * self.group.size, dtype=torch.float32).zero_()
        return functools.partial(function, *((block, tensor) if kind == "all_gather_into_tensor" else (tensor, block)))


def _take_modules() -> dict[str, ModuleType]:
    """Take all of `syncline` out of what is imported."""
    names = [name for name in sys.modules if name == _NAMESPACE or name.startswith(f"{_NAMESPACE}.")]
    return {name: sys.modules.pop(name) for name in names}


def compare(versions: dict[str, Version], kind: str, nbytes: int, place: str, turns: int) -> dict[str, list[float]]:
    """The seconds of a call, for each version and turn. All ranks call it."""
    calls = {}
    for name, version in versions.items():
        with version.imported():
            calls[name] = version.call(kind, nbytes, place)
            for _ in range(_WARM_UP):
                calls[name]()
    repetitions = max(_LEAST_CALLS, min(_MOST_CALLS, _CALLS_BYTES // nbytes))
    taken: dict[str, list[float]] = {name: [] for name in versions}
    for turn in range(turns):
        for name in order_of_round(turn, versions):
            with versions[name].imported():
                call = calls[name]
                versions[name].group.barrier()
                began = time.perf_counter()
                for _ in range(repetitions):
                    call()
                taken[name].append((time.perf_counter() - began) / repetitions)
    return taken


def row(kind: str, nbytes: int, place: str, taken: dict[str, list[float]]) -> str:
    """A line of the table. A pure function."""
    ratios = Summary.of([today / before for before, today in zip(taken[COMMIT], taken[TODAY], strict=True)])
    times = [f"{1e6 * Summary.of(taken[name]).median_s:10.1f}" for name in (COMMIT, TODAY)]
    ratio = f"{ratios.median_s:6.2f} [{ratios.p25_s:.2f} {ratios.p75_s:.2f}]"
    return f"{kind:24}{nbytes:>10}  {place:8}{' '.join(times)} {ratio}"


def unpack(commit: str, folder: Path) -> None:
    """Put the sources of a commit into a folder.

    Raises:
        SystemExit: there is no such commit, or it had no collectives.
    """
    packed = subprocess.run(("git", "-C", ROOT, "archive", commit, str(SOURCES)), capture_output=True, check=False)
    if packed.returncode != 0:
        raise SystemExit(f"bench versions: the sources of {commit!r} cannot be had: {packed.stderr.decode().strip()}")
    subprocess.run(("tar", "-x", "-C", folder), input=packed.stdout, check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank of the job calls it."""
    parser = argparse.ArgumentParser(prog="bench versions", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("commit", help="what to compare with: a commit, a tag or a branch")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["all_reduce"], help="which collectives")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES, help="plain memory, a window, or both")
    number = session.at_least_one
    parser.add_argument("--bytes", nargs="+", type=number, default=BYTES, metavar="N", help="of each rank's tensor")
    parser.add_argument("--turns", type=number, default=40, metavar="N")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    versions = {TODAY: Version(None)}
    group = versions[TODAY].group
    with tempfile.TemporaryDirectory() as folder:  # each rank has its own: what fails here fails on all
        unpack(options.commit, Path(folder))
        versions[COMMIT] = Version(Path(folder) / SOURCES)
        if group.rank == 0:
            print(f"{'':24}{'bytes':>10}  {'memory':8}{options.commit[:10]:>10} {TODAY:>10}  ratio; {group.size} ranks, us")
        for kind in options.kinds:
            for nbytes in options.bytes:
                for place in options.places:
                    if place == "window" and nbytes < LEAST_WINDOW_BYTES:
                        continue
                    taken = compare(versions, kind, nbytes, place, options.turns)
                    if group.rank == 0:
                        print(row(kind, nbytes, place, taken), flush=True)
        for version in versions.values():  # before its sources go, of which something may be imported only now
            with version.imported():
                version.group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
