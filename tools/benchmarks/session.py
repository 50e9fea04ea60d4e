"""The common part of all benchmarks in this folder: options, groups, and places for figures."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from syncline.collectives import MisuseError, ProcessGroup, destroy_process_group, exchange_objects, init_process_group
from syncline.collectives.cli.bench.results import require_matplotlib
from syncline.collectives.startup.rendezvous import tcp_store_of_rank_0

from .cases import FULL, QUICK, Scale
from .report import Report

Part = Callable[[argparse.Namespace, ProcessGroup, Report], None]
"""Measures one thing, shows and keeps it."""


def play(benchmark: str, description: str | None, parts: Mapping[str, Part], arguments: Sequence[str] | None) -> int:
    """A whole benchmark: parse, connect, measure each requested part. Every rank calls it; returns the exit status."""
    return play_parsed(benchmark, parts, parse(parser(description, list(parts)), arguments))


def play_parsed(benchmark: str, parts: Mapping[str, Part], options: argparse.Namespace) -> int:
    """A whole benchmark with options that are already parsed."""
    with groups() as group:
        report = Report(benchmark, options, group)
        for part in options.parts:
            parts[part](options, group, report)
    return 0


def parser(description: str | None, parts: Sequence[str]) -> argparse.ArgumentParser:
    """The options of every benchmark; `parts` are the parts that it can measure."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="what to measure (default: all)")
    made.add_argument(
        "--steps", type=at_least_one, default=40, metavar="N", help="measured steps of each contender (default: %(default)s)"
    )
    made.add_argument("--json", type=Path, metavar="PATH", help="write all figures to this file")
    made.add_argument("--plot", type=Path, metavar="FOLDER", help="draw a picture of each part into this folder")
    made.add_argument("--quick", action="store_true", help="tiny models: shows that it runs; the figures mean nothing")
    return made


def at_least_one(text: str) -> int:
    """A whole number of 1 or more, as an argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text}")
    return int(text)


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse, and refuse outputs that cannot be written, before anything is measured."""
    options = made.parse_args(arguments)
    if options.json is not None and not options.json.resolve().parent.is_dir():
        made.error(f"--json: there is no folder {options.json.resolve().parent}")
    if options.plot is not None:
        try:
            require_matplotlib()
            options.plot.mkdir(parents=True, exist_ok=True)
        except (MisuseError, OSError) as error:
            made.error(f"--plot: {error}")
    return options


def scale(options: argparse.Namespace) -> Scale:
    """The size of the models."""
    return QUICK if options.quick else FULL


@contextmanager
def groups() -> Iterator[ProcessGroup]:
    """Our default group, and torch's over Gloo. One thread for each rank, the same seed on all."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = init_process_group()
    # Over the network and not in a file, because ranks of several hosts need not share a folder.
    store = dist.PrefixStore("benchmarks", tcp_store_of_rank_0(group, group.timeout_s))
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    try:
        yield group
    finally:
        dist.destroy_process_group()
        destroy_process_group()
        torch.set_num_threads(threads)


@contextmanager
def shared_folder(group: ProcessGroup) -> Iterator[Path]:
    """A folder for ranks of one machine; deleted at the end. A collective."""
    folder = Path(exchange_objects(tempfile.mkdtemp() if group.rank == 0 else "", group=group)[0])
    try:
        yield folder
        group.barrier()
    finally:
        if group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
