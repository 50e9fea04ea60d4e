"""A process that loads torch once, and then forks ranks. A new process for each rank would need seconds to load torch.

`run_processes` starts this process. Each line of the standard input is a job, as JSON. For each job, the process writes one
line to the standard output, with the exit statuses of the ranks. The process ends when its input ends. The process has only one
thread, so it can fork safely.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch  # noqa: F401, the forked ranks use it

_STACKS_S = 5.0
_POLL_S = 0.01
_PARENT = os.getppid()


def main() -> None:
    """Run the jobs from the standard input. In a forked rank, this function returns when the rank's script has ended."""
    for line in sys.stdin:
        job = json.loads(line)
        for module in job["preload"]:
            importlib.import_module(module)
        gc.freeze()  # otherwise the garbage collector of each rank visits all loaded objects, which copies their memory
        ranks = []
        for rank in range(job["world_size"]):
            if (process := os.fork()) == 0:
                _become_rank(rank, job)
                return
            ranks.append(process)
        statuses, timed_out = _wait(ranks, job["timeout_s"])
        print(json.dumps({"statuses": statuses, "timed_out": timed_out}), flush=True)


def _become_rank(rank: int, job: dict[str, Any]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(job["outputs"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for opened, standard in ((null, 0), (output, 1), (output, 2)):
        os.dup2(opened, standard)
    os.close(null)
    os.close(output)
    os.environ.clear()
    os.environ.update(job["environ"])
    os.chdir(job["cwd"])
    faulthandler.enable()
    script = job["script"]
    sys.path[:] = [os.path.dirname(script), *job["path"]]
    sys.argv[:] = [script, str(rank), str(job["world_size"]), job["folder"]]
    runpy.run_path(script, run_name="__main__")


def _wait(ranks: Sequence[int], timeout_s: float) -> tuple[list[int], bool]:
    statuses: dict[int, int] = {}
    _reap(ranks, statuses, timeout_s)
    left = [rank for rank in ranks if rank not in statuses]
    for number in (signal.SIGABRT, signal.SIGKILL):  # at SIGABRT, faulthandler prints the stacks
        for rank in ranks:
            if rank not in statuses:
                os.kill(rank, number)
        _reap(ranks, statuses, _STACKS_S)
    return [statuses.get(rank, -signal.SIGKILL) for rank in ranks], bool(left)


def _reap(ranks: Sequence[int], statuses: dict[int, int], timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while True:
        for rank in ranks:
            if rank not in statuses:
                ended, status = os.waitpid(rank, os.WNOHANG)
                if ended:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
        if len(statuses) == len(ranks) or time.monotonic() > end_s:
            return
        # The parent has died, so kill all ranks and this process.
        if os.getppid() != _PARENT:
            os.killpg(0, signal.SIGKILL)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
