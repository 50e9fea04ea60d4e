"""One rank of `dev.py bench elastic`: ELASTIC_JOB RANK WORLD_SIZE FOLDER."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.cases import FULL, QUICK, Case, many_tiny, mlp, transformer
from syncline.collectives import ProcessGroup, destroy_process_group, get_default_group, init_process_group
from syncline.ddp import DistributedDataParallel, Elastic, ElasticSampler

_STEPS = 5  # in one turn
_ENOUGH = 2**40  # samples: no epoch ends


def main(rank: int, size: int, folder: Path) -> None:
    """Every rank measures, rank 0 writes what it found."""
    torch.set_num_threads(1)
    options = json.loads((folder / "options.json").read_text())
    init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=size)
    scale = QUICK if options["quick"] else FULL
    cases = (mlp(64, scale), transformer(8, scale), many_tiny(scale))
    found = {case.name: _steps_s(case, get_default_group(), options["rounds"]) for case in cases}
    if rank == 0:
        (folder / "steps.json").write_text(json.dumps(found))
    destroy_process_group()


def _steps_s(case: Case, group: ProcessGroup, rounds: int) -> dict[str, list[float]]:
    """For each contender the seconds of a step, once for each turn; the first turn of each is not counted."""
    turns = {"plain": _plain(case), "elastic": _elastic(case, group)}
    found: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name in sorted(turns, reverse=number % 2 == 0):
            group.barrier()
            began_s = time.perf_counter()
            turns[name]()
            if number > 0:
                found[name].append((time.perf_counter() - began_s) / _STEPS)
    return found


def _plain(case: Case) -> Callable[[], None]:
    model, optimizer, batch = _contender(case)

    def turn() -> None:
        for _ in range(_STEPS):
            _train(case, model, optimizer, batch)

    return turn


def _elastic(case: Case, group: ProcessGroup) -> Callable[[], None]:
    model, optimizer, batch = _contender(case)
    elastic = Elastic(model, optimizer, ElasticSampler(_ENOUGH, group.size, shuffle=False))
    batches: Iterator[torch.Tensor] = elastic.batches(itertools.repeat(batch))

    def turn() -> None:
        for given in itertools.islice(batches, _STEPS):
            with elastic.step():
                _train(case, model, optimizer, given)

    return turn


def _contender(case: Case) -> tuple[DistributedDataParallel, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(case.model())
    return model, torch.optim.SGD(model.parameters(), lr=1e-4), case.batch()


def _train(case: Case, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    case.loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
