"""Runs torch's own distributed suite over ours, several tests in one job: `run_suite(variant, names, ...)`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")
JOB_S = 600.0


def suite_names() -> list[str]:
    """All tests of the suite."""
    listing = (
        "import os; os.environ.update(BACKEND='gloo', WORLD_SIZE='2', TEMP_DIR='/tmp');"
        "from torch.testing._internal.distributed.distributed_test import DistributedTest as D;"
        "print(*[n for n in dir(D._DistTestBase) if n.startswith('test_')])"
    )
    return subprocess.run(
        (sys.executable, "-W", "ignore", "-c", listing), capture_output=True, text=True, check=True
    ).stdout.split()


def run_suite(variant: str, names: Sequence[str], launcher: Sequence[str], size: int) -> dict[str, str]:
    """Run tests in as few jobs as possible, a new one after each failure.

    Args:
        variant: what of ours is put in place of torch's: "our-group", "our-ddp" and "our-batch-norm", joined by "+".
        names: the tests.
        launcher: starts the ranks.
        size: how many ranks that are.

    Returns:
        How each test ended: "pass", "skip", or what was wrong on the first rank with which something was.
    """
    found: dict[str, str] = {}
    attempt = 0
    while left := [name for name in names if name not in found]:
        attempt += 1
        with tempfile.TemporaryDirectory(prefix="syncline-torch-suite-") as folder:
            command = (*launcher, sys.executable, str(WORKER), variant, folder, *left)
            job_env = {**os.environ, "SUITE_ATTEMPT": str(attempt), "OMP_NUM_THREADS": "1"}
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(command, env=job_env, capture_output=True, timeout=JOB_S)
            new = {name: _verdict(Path(folder), name, size) for name in left}
        ended = {name: verdict for name, verdict in new.items() if verdict is not None}
        if not ended:  # it died before a verdict
            ended = {left[0]: "died"}
        found.update(ended)
    return found


def _verdict(folder: Path, name: str, size: int) -> str | None:
    files = [folder / f"{name}.{rank}.json" for rank in range(size)]
    said = [json.loads(file.read_text()) if file.exists() else None for file in files]
    if all(verdict is None for verdict in said):
        return None
    bad = [f"rank {rank}: {verdict or 'hang'}" for rank, verdict in enumerate(said) if verdict not in ("pass", "skip")]
    if bad:
        return bad[0]
    return "skip" if "skip" in said else "pass"


def main() -> None:
    """`driver.py VARIANT RANKS FILE [TEST...]`: write how each test ended as JSON, and count."""
    variant, size, out, *chosen = sys.argv[1:]
    found = run_suite(variant, chosen or suite_names(), (str(Path(sys.executable).with_name("mpiexec")), "-n", size), int(size))
    Path(out).write_text(json.dumps(found, indent=1))
    print(variant, {kind: list(found.values()).count(kind) for kind in ("pass", "skip")}, "of", len(found))


if __name__ == "__main__":
    main()
