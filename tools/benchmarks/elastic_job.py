"""One rank of `dev.py bench elastic`: ELASTIC_JOB RANK WORLD_SIZE FOLDER."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import FULL, QUICK, Case, many_tiny, mlp, transformer
from syncline.collectives import ProcessGroup, destroy_process_group, get_default_group, init_process_group
from syncline.ddp import DistributedDataParallel, Elastic, ElasticSampler
from syncline.ddp.step_snapshot import StepSnapshot

_STEPS = 5  # steps in one turn
_CALLS = 200  # calls to measure one part alone
_ENOUGH = 2**40  # samples, so many that no epoch ends


def main(rank: int, size: int, folder: Path) -> None:
    """Every rank measures; rank 0 writes the result."""
    torch.set_num_threads(1)
    options = json.loads((folder / "options.json").read_text())
    init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=size)
    scale = QUICK if options["quick"] else FULL
    cases = (mlp(64, scale), transformer(8, scale), many_tiny(scale))
    found = {case.name: _measured(case, get_default_group(), options["rounds"]) for case in cases}
    if rank == 0:
        (folder / "steps.json").write_text(json.dumps(found))
    destroy_process_group()


def _measured(case: Case, group: ProcessGroup, rounds: int) -> dict[str, Any]:
    """For each contender, wall and processor seconds of a step, once for each turn; and each part of the cost.

    The first turn of each contender is not counted. "again" is the same as "plain", so its ratio shows the noise.
    """
    model, elastic, turn = _elastic(case, group)
    turns = {"plain": _plain(case), "again": _plain(case), "elastic": turn}
    found: dict[str, Any] = {name: {"wall_s": [], "cpu_s": []} for name in turns}
    for number in range(rounds + 1):
        names = sorted(turns, key=lambda name: (list(turns).index(name) + number) % len(turns))
        for name in names if number % 2 == 0 else reversed(names):
            group.barrier()
            wall_s, cpu_s = _timed(turns[name], _STEPS)
            if number > 0:
                found[name]["wall_s"].append(wall_s)
                found[name]["cpu_s"].append(cpu_s)
    earlier = StepSnapshot(model.module)
    parts = {"agreement": lambda: elastic._sum_over_ranks(0), "snapshot": lambda: StepSnapshot(model.module, earlier=earlier)}
    found["parts"] = {name: _timed(lambda part=part: [part() for _ in range(_CALLS)], _CALLS) for name, part in parts.items()}  # type: ignore[misc]
    return found


def _timed(body: Callable[[], object], count: int) -> tuple[float, float]:
    """Wall and processor seconds (of all threads) of one call, as the mean of `count` calls."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    body()
    return (time.perf_counter() - began_s) / count, (time.process_time() - began_cpu_s) / count


def _plain(case: Case) -> Callable[[], None]:
    model, optimizer, batch = _contender(case)

    def turn() -> None:
        for _ in range(_STEPS):
            _train(case, model, optimizer, batch)

    return turn


def _elastic(case: Case, group: ProcessGroup) -> tuple[DistributedDataParallel, Elastic, Callable[[], None]]:
    model, optimizer, batch = _contender(case)
    elastic = Elastic(model, optimizer, ElasticSampler(_ENOUGH, group.size, shuffle=False))
    batches: Iterator[torch.Tensor] = elastic.batches(_Repeated(batch))

    def turn() -> None:
        for given in itertools.islice(batches, _STEPS):
            with elastic.step():
                _train(case, model, optimizer, given)

    return model, elastic, turn


class _Repeated:
    """A loader that gives one batch for ever."""

    def __init__(self, batch: torch.Tensor) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.repeat(self._batch)


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
