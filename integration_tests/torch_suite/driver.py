"""Starts the ranks that run torch's tests, and starts them again after each failure or hang, until all have an outcome."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from variants import VARIANTS

WORKER = Path(__file__).with_name("worker.py")
_TESTS_AT_ONCE = 30


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test.

    Attributes:
        kind: "passed", "skipped", "failed" or "hung" (or a rank crashed).
        why: the ranks' output, if the kind is not "passed".
    """

    kind: str
    why: str = ""


def run_tests(
    variant: str,
    tests: list[str],
    world_size: int,
    folder: Path,
    mpiexec: list[str],
    *,
    python: Sequence[str] = (sys.executable,),
    limit_s: float = 1500.0,
) -> dict[str, Outcome]:
    """The outcomes of the named tests of torch's `_DistTestBase`.

    Args:
        variant: a key of `VARIANTS`.
        tests: names of methods.
        world_size: how many ranks.
        folder: an empty one, for the ranks' files.
        mpiexec: the command that starts ranks, if MPI does.
        python: the command in place of Python there.
        limit_s: seconds for one job.

    Raises:
        AssertionError: the ranks did not reach the first of their tests; the message is their output.
    """
    outcomes: dict[str, Outcome] = {}
    while remaining := [test for test in tests if test not in outcomes]:
        job = folder / f"job-{len(list(folder.iterdir()))}"
        job.mkdir()
        said = _run_job(variant, remaining, world_size, job, [*mpiexec, "-n", str(world_size), *python], limit_s)
        found = _read(job, world_size)
        stuck = next((test for test in remaining if test not in found), None)
        outcomes.update(found)
        if any(outcome.kind == "failed" for outcome in found.values()) or stuck is None:
            continue
        assert (job / "barrier").exists() or found, f"the ranks of {variant!r} did not start:\n{said}"
        stacks = "".join(path.read_text() for path in sorted(job.glob("stacks-*")))
        outcomes[stuck] = Outcome("hung", f"{said[-4000:]}\n{stacks[-4000:]}")
    return outcomes


def _run_job(variant: str, tests: list[str], world_size: int, job: Path, under_mpi: list[str], limit_s: float) -> str:
    (job / "tests").write_text("\n".join(tests))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "STORE_PORT": str(store.port), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    words = [str(WORKER), variant, str(job)]
    if VARIANTS[variant].needs_mpi:
        commands = [([*under_mpi, *words], environment)]
    else:
        places = [{"RANK": str(rank), "WORLD_SIZE": str(world_size)} for rank in range(world_size)]
        commands = [([sys.executable, *words], environment | place) for place in places]
    output = job / "output"
    with output.open("w") as out:
        processes = [subprocess.Popen(each, env=env, stdout=out, stderr=subprocess.STDOUT) for each, env in commands]
        end_s = time.monotonic() + limit_s
        try:
            for process in processes:
                process.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return output.read_text(errors="replace")


def _read(job: Path, world_size: int) -> dict[str, Outcome]:
    """The outcomes of tests that every rank ended."""
    by_rank = []
    for rank in range(world_size):
        path = job / f"outcomes-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        by_rank.append({test: Outcome(kind, why) for test, kind, why in map(json.loads, lines)})
    ended = [test for test in by_rank[0] if all(test in outcomes for outcomes in by_rank)]
    return {test: _together([outcomes[test] for outcomes in by_rank]) for test in ended}


def _together(outcomes: list[Outcome]) -> Outcome:
    why = "\n".join(f"rank {rank}: {outcome.kind} {outcome.why}" for rank, outcome in enumerate(outcomes))
    kinds = {outcome.kind for outcome in outcomes}
    if "failed" in kinds:
        return Outcome("failed", why)
    return Outcome("passed") if "passed" in kinds else Outcome("skipped", why)


def main() -> None:
    """Run one variant, and write the outcomes: `python driver.py VARIANT RANKS OUTPUT [TEST...]`.

    Tests that have an outcome in OUTPUT already are not run again.
    """
    os.environ["BACKEND"] = "gloo"
    os.environ.setdefault("WORLD_SIZE", sys.argv[2])
    os.environ.setdefault("TEMP_DIR", "/tmp")
    variant, world_size, output = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    tests = sys.argv[4:] or all_tests()
    outcomes = _read_output(output)
    tests = [test for test in tests if test not in outcomes]
    begin_s = time.monotonic()
    for first in range(0, len(tests), _TESTS_AT_ONCE):
        folder = output.with_suffix(".jobs")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        some = tests[first : first + _TESTS_AT_ONCE]
        outcomes |= run_tests(variant, some, world_size, folder, [str(Path(sys.executable).parent / "mpiexec")])
        output.write_text(json.dumps({test: [outcome.kind, outcome.why] for test, outcome in outcomes.items()}, indent=1))
    kinds = [outcome.kind for outcome in outcomes.values()]
    counts = {kind: kinds.count(kind) for kind in ("passed", "skipped", "failed", "hung")}
    print(f"{variant}, {world_size} ranks: {counts}, {time.monotonic() - begin_s:.0f} s")
    print("\n".join(f"  {outcome.kind}: {test}" for test, outcome in outcomes.items() if outcome.kind in ("failed", "hung")))


def _read_output(path: Path) -> dict[str, Outcome]:
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {test: Outcome(kind, why) for test, (kind, why) in rows.items()}


def all_tests() -> list[str]:
    """The names of torch's tests, in the order of the file. Needs BACKEND, WORLD_SIZE and TEMP_DIR in the environment."""
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    return [name for name in vars(DistributedTest._DistTestBase) if name.startswith("test_")]


if __name__ == "__main__":
    main()
