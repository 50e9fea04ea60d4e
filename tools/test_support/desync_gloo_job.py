"""Runs the desync catalogue over Gloo: `python -m test_support.desync_gloo_job FOLDER RANKS [--all]`; prints outcomes as JSON.

Each rank of each program is a process of its own, because Gloo may end the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.transports import gloo
from test_support.desync_programs import ENDED, NUMELS, QUICK, catalogue, outcome, time_limit_s

_LIMIT_S = 20.0
# Each rank is a process, and there are more processes than cores. So a late rank must not count as one that disagrees.
LEAST_TIMEOUT_S = 2.0
_AT_ONCE = 4


def cases(*, whole: bool) -> Iterator[tuple[str, str, bool]]:
    """Program, size, and whether calls are checked: for the whole catalogue, or one program of each kind."""
    for name in catalogue() if whole else QUICK:
        yield from ((name, size, False) for size in (NUMELS if whole else ("small",)))
        yield name, "small", True


def run_rank(folder: Path, rank: int, ranks: int, name: str, size: str, check_calls: bool) -> None:
    """Run one rank of a program, and leave its outcome in the folder."""
    store = dist.FileStore(str(folder / "store"), ranks)
    transport = gloo.connect(store, rank, ranks, "desync", CancelScope(_LIMIT_S))
    program = catalogue()[name]
    limit_s = max(LEAST_TIMEOUT_S, time_limit_s(program, compares=check_calls))
    group = HostGroup(transport, rank, ranks, timeout_s=limit_s, check_calls=check_calls)
    said = outcome(group, program, NUMELS[size])
    (folder / f"rank-{rank}").write_text(said)
    # Gloo's sockets live until all ranks have written, so that no rank fails because another has ended.
    end_s = time.monotonic() + limit_s
    while not all((folder / f"rank-{other}").exists() for other in range(ranks)) and time.monotonic() < end_s:
        time.sleep(0.005)
    os._exit(0)


def start(folder: Path, ranks: int, case: tuple[str, str, bool]) -> list[int]:
    """The processes of a program's ranks."""
    folder.mkdir()
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            with (folder / f"output-{rank}").open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                try:
                    run_rank(folder, rank, ranks, *case)
                finally:
                    os._exit(1)
        processes.append(process)
    return processes


def main(folder: Path, ranks: int, *, whole: bool) -> None:
    """Run all programs, some at a time."""
    waiting = [(number, case) for number, case in enumerate(cases(whole=whole))][::-1]
    running: dict[int, int] = {}
    found = []
    while waiting or running:
        while waiting and len(set(running.values())) < _AT_ONCE:
            number, case = waiting.pop()
            running |= dict.fromkeys(start(folder / str(number), ranks, case), number)
        process, _ = os.wait()
        del running[process]
    for number, case in enumerate(cases(whole=whole)):
        paths = [folder / str(number) / f"rank-{rank}" for rank in range(ranks)]
        found.append((case, [path.read_text() if path.exists() else ENDED for path in paths]))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), whole="--all" in sys.argv)
