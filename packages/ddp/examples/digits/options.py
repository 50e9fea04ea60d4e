"""The command line: what may be said, and what is refused before any training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from data import TRAIN_IMAGES
from syncline.collectives import ProcessGroup, backend_names, destroy_process_group, exchange_objects

EPOCHS = 20
BATCH_SIZE = 96
LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Options:
    """What the command line says. `batch_size` counts the images of all ranks together; None leaves it to the script."""

    epochs: int
    batch_size: int | None
    seed: int
    backend: str | None
    report: Path | None
    timeline: Path | None
    trace: Path | None

    def batch_size_for(self, ranks: int) -> int:
        """What was asked for, or a multiple of the number of ranks near the default."""
        return self.batch_size or max(1, round(BATCH_SIZE / ranks)) * ranks


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; a bad value ends the process at once, with status 2."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits, on all ranks of the job.")
    add = parser.add_argument
    add("--epochs", type=_whole(1), default=EPOCHS, metavar="N", help=f"passes over the training images (default: {EPOCHS})")
    add(
        "--batch-size",
        type=_whole(1, TRAIN_IMAGES),
        metavar="N",
        help=f"images in a step, of all ranks together; a multiple of their number (default: about {BATCH_SIZE})",
    )
    add("--seed", type=_whole(0, LARGEST_SEED), default=0, metavar="N", help="of weights and shuffling (default: 0)")
    add("--backend", choices=backend_names(), help="communication backend (default: automatic)")
    add("--report", type=Path, metavar="PATH", help="also write the report there, as JSON")
    add("--timeline", type=Path, metavar="PATH", help="draw one step on every rank there, as PNG")
    add("--trace", type=Path, metavar="FOLDER", help="trace steps 10 to 20 on every rank there; see `syncline report`")
    options = Options(**vars(parser.parse_args(arguments)))
    if options.report and options.report == options.timeline:
        parser.error(f"--report and --timeline both name {options.report}; expected two files")
    return options


def check_with_group(options: Options, group: ProcessGroup) -> None:
    """End all ranks with status 2 if what was asked for cannot be done with this group or on rank 0's disk. A collective."""
    complaint = _complaint(options, group.size) if group.rank == 0 else None
    complaint = exchange_objects(complaint, group=group)[0]
    if complaint is None:
        return
    if group.rank == 0:
        print(f"{Path(sys.argv[0]).name}: error: {complaint}", file=sys.stderr, flush=True)
    destroy_process_group()
    sys.exit(2)


def _complaint(options: Options, ranks: int) -> str | None:
    if options.batch_size_for(ranks) % ranks:
        return f"--batch-size: expected a multiple of the number of ranks, {ranks}, found {options.batch_size}"
    if options.batch_size_for(ranks) > TRAIN_IMAGES:
        return f"expected at most as many ranks as training images, {TRAIN_IMAGES}, found {ranks}"
    if options.timeline and find_spec("matplotlib") is None:
        return "--timeline: matplotlib is not installed; run pip install matplotlib"
    for name, path in (("--report", options.report), ("--timeline", options.timeline)):
        if path and (problem := _problem_with_writing(path)):
            return f"{name}: {path} cannot be written: {problem}"
    return None


def _problem_with_writing(path: Path) -> str | None:
    """Why a file cannot be written, found out by opening it; leaves no trace."""
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        return error.strerror
    return None


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A type for argparse: whole numbers within limits."""
    limits = f"from {least} to {most}" if most is not None else f"of at least {least}"

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"expected a whole number {limits}, found {text!r}")
        return number

    return convert
