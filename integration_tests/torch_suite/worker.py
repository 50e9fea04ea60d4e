"""Runs tests of torch's own distributed suite on this rank, one after the other: `worker.py VARIANT FOLDER TEST...`.

The suite starts processes for each test; here the ranks stay and share one group. After each test the ranks compare how it
ended, by files. After a failure the state of the group is unknown, so all ranks end with status `AGAIN`, and whoever started
them goes on with the next test.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

AGAIN = 75
# A test that takes longer hangs; whoever waits for another rank's verdict gives up a little later.
TEST_S = 25.0
VERDICT_S = 35.0


def main() -> int:
    variant, folder, *names = sys.argv[1:]
    rank, size = _place()
    warnings.simplefilter("ignore")
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), RANK=str(rank), TEMP_DIR=str(_shared(folder)))
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test

    _put_ours_in_place(variant, distributed_test)
    case = type("Case", (distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase), {})
    _connect(variant, dist, Path(folder), rank, size)
    for name in names:
        verdict = _run(case, name, rank, Path(folder))
        verdicts = _exchange(Path(folder), name, verdict, rank, size)
        if any(other not in ("pass", "skip") for other in verdicts):
            sys.stdout.flush()
            os._exit(AGAIN)
    os._exit(0)


def _place() -> tuple[int, int]:
    for rank, size in (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    raise SystemExit("start it under mpiexec")


def _shared(folder: str) -> Path:
    place = Path(folder) / "temp"
    for part in ("barrier", "test_dir", "init_dir"):
        (place / part).mkdir(parents=True, exist_ok=True)
    return place


def _put_ours_in_place(variant: str, distributed_test: Any) -> None:
    import torch

    if "our-ddp" in variant:
        from syncline.ddp import DistributedDataParallel

        torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc, assignment]
    if "our-batch-norm" in variant:
        from syncline.ddp import SyncBatchNorm

        torch.nn.SyncBatchNorm = SyncBatchNorm  # type: ignore[misc, assignment]


def _connect(variant: str, dist: Any, folder: Path, rank: int, size: int) -> None:
    timeout = timedelta(seconds=TEST_S - 5)
    if "our-group" in variant:
        import syncline.collectives.torch_backend  # noqa: F401 - it registers the backends

        dist.init_process_group("syncline-mpi", init_method="mpi://", timeout=timeout)
    else:
        store = dist.FileStore(str(folder / f"store-{os.environ['SUITE_ATTEMPT']}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def _run(case: Any, name: str, rank: int, folder: Path) -> str:
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed

    set_rng_seed(1234)  # the same on all ranks, as the suite's own processes have it
    faulthandler.dump_traceback_later(TEST_S + 5, exit=True)
    began_s = time.monotonic()
    try:
        test = case(name)
        test.rank = rank
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            test.file_name = file.name
            getattr(test, name)()
        verdict = "pass"
    except unittest.SkipTest:
        verdict = "skip"
    except SystemExit as exit_:
        verdict = "skip" if exit_.code in {skip.exit_code for skip in TEST_SKIPS.values()} else f"exit {exit_.code}"
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is this test's
        text = "".join(traceback.format_exception(error))
        (folder / f"{name}.{rank}.txt").write_text(text)
        verdict = f"fail: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    faulthandler.cancel_dump_traceback_later()
    if time.monotonic() - began_s > TEST_S:
        verdict = f"slow; {verdict}"
    return verdict


def _exchange(folder: Path, name: str, verdict: str, rank: int, size: int) -> list[str]:
    """What all ranks say of a test; one that says nothing hangs."""
    mine = folder / f"{name}.{rank}.json"
    mine.with_suffix(".new").write_text(json.dumps(verdict))
    mine.with_suffix(".new").rename(mine)
    end_s = time.monotonic() + VERDICT_S
    others = [folder / f"{name}.{other}.json" for other in range(size)]
    while not all(other.exists() for other in others) and time.monotonic() < end_s:
        time.sleep(0.005)
    return [json.loads(other.read_text()) if other.exists() else "hang" for other in others]


if __name__ == "__main__":
    sys.exit(main())
