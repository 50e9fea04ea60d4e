"""One rank: runs tests of torch's `DistributedTest`, one after the other, each in a process group of its own.

Usage: `python worker.py VARIANT FOLDER`, with RANK, WORLD_SIZE and STORE_PORT in the environment; under mpiexec the launcher
    sets
the rank. FOLDER/tests has the names, one a line. Outcomes go to FOLDER/outcomes-RANK, one JSON list a line. The ranks agree
after each test, through a store that the driver serves. They stop after a test that did not pass on every rank, because calls
that it left in flight must not reach the next one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import sys
import traceback
import unittest
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from cpu_in_place_of_gpu import TorchOnCpu, cpu_in_place_of_gpu, neutralise_guards, without_device_ids
from variants import VARIANTS, Variant

LIMIT_S = 150.0  # for one test; the slowest takes 10 s on free cores, and fifteen times as long on busy ones
GROUP_LIMIT_S = 20.0  # for one collective

_DEBUG_LEVEL = "TORCH_DISTRIBUTED_DEBUG"
_DEBUG_LEVEL_AT_FIRST = os.environ.get(_DEBUG_LEVEL)

# torch skips tests by the backend's name. As "gloo" it runs all tests that a CPU can run.
os.environ["BACKEND"] = "gloo"


def main() -> None:
    """Run the tests of the list."""
    variant, folder = VARIANTS[sys.argv[1]], Path(sys.argv[2])
    rank, world_size = _place()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), TEMP_DIR=str(folder))

    import torch.distributed as dist

    suite = _suite(variant)
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=False)
    # The launcher's log may be full of other output, so the stacks of a hanging rank go to a file.
    with (folder / f"outcomes-{rank}").open("a") as outcomes, (folder / f"stacks-{rank}").open("w") as stacks:
        for test in (folder / "tests").read_text().split():
            faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=stacks)
            outcome, why = "skipped", ""
            if not getattr(getattr(suite, test), "__unittest_skip__", False):
                _clear(folder, rank, suite)
                _agree(store, f"{test} begins", rank, world_size, "")
                outcome, why = _run(suite, test, variant, rank, world_size, folder)
            outcomes.write(json.dumps([test, outcome, why]) + "\n")
            outcomes.flush()
            if set(_agree(store, f"{test} ended", rank, world_size, outcome)) & {"failed"}:
                break
            _destroy()
            faulthandler.cancel_dump_traceback_later()
        outcomes.flush()
    os._exit(0)  # without a wait for calls that a failed test left in flight


def _place() -> tuple[int, int]:
    for rank, size in (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("RANK", "WORLD_SIZE")):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    raise SystemExit("expected RANK and WORLD_SIZE, or those of mpiexec, in the environment; found none")


def _suite(variant: Variant) -> Any:
    """torch's class of tests, with the variant's replacements."""
    import torch

    if variant.plays_gpus:
        neutralise_guards()
    from torch.testing._internal.distributed import distributed_test

    if variant.needs_mpi:
        from syncline.collectives import torch_backend

        distributed_test.dist.monitored_barrier = torch_backend.monitored_barrier  # torch's requires the name "gloo"
    if variant.has_our_ddp:
        from syncline.ddp import DistributedDataParallel

        _replace_ddp(DistributedDataParallel)
    if variant.has_our_hooks:
        _replace_hooks()
    if variant.plays_gpus:
        distributed_test.torch = TorchOnCpu("torch")  # type: ignore[assignment]
        _replace_ddp(without_device_ids(torch.nn.parallel.DistributedDataParallel))

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    Suite.barrier_class = distributed_test.Barrier
    return Suite


def _replace_ddp(wrapper: Any) -> None:
    import torch
    from torch.testing._internal.distributed import distributed_test

    torch.nn.parallel.DistributedDataParallel = wrapper  # type: ignore[misc]
    distributed_test.DistributedDataParallel = wrapper


def _replace_hooks() -> None:
    """Put our hooks in place of torch's with the same name."""
    import torch
    from torch.testing._internal.distributed import distributed_test as tests

    from syncline import hooks
    from syncline.ddp import SyncBatchNorm

    torch.nn.SyncBatchNorm = SyncBatchNorm  # type: ignore[misc, assignment]
    for module in (
        tests.default,
        tests.powerSGD,
        tests.post_localSGD,
        tests.averagers,
        tests.hierarchicalSGD,
        tests.post_localSGD_optimizer,
    ):
        for name in set(hooks.__all__) & set(vars(module)):
            setattr(module, name, getattr(hooks, name))


def _clear(folder: Path, rank: int, suite: Any) -> None:
    """Clear the folders through which torch's tests meet."""
    suite.barrier_class.barrier_id = 0
    if rank == 0:
        for name in ("barrier", "test_dir", "init_dir"):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir()


def _agree(store: Any, what: str, rank: int, world_size: int, word: str) -> list[str]:
    """The word of every rank."""
    store.set(f"{what} {rank}", word)
    keys = [f"{what} {other}" for other in range(world_size)]
    store.wait(keys, timedelta(seconds=LIMIT_S))
    return [store.get(key).decode() for key in keys]


def _reset_debug_level() -> None:
    """torch's tests of debug levels leave the last level in force; with it, DDP's errors in later tests name parameters."""
    import torch.distributed as dist

    os.environ.pop(_DEBUG_LEVEL, None)
    if _DEBUG_LEVEL_AT_FIRST is not None:
        os.environ[_DEBUG_LEVEL] = _DEBUG_LEVEL_AT_FIRST
    dist.set_debug_level_from_env()


def _run(suite: Any, test: str, variant: Variant, rank: int, world_size: int, folder: Path) -> tuple[str, str]:
    import torch.distributed as dist
    from torch.testing._internal import common_utils

    case = suite(test)
    case.rank = rank
    case.file_name = str(folder / f"store of {test}")
    _reset_debug_level()
    try:
        dist.init_process_group(
            variant.backend,
            init_method=f"file://{case.file_name}",
            world_size=world_size,
            rank=rank,
            timeout=timedelta(seconds=GROUP_LIMIT_S),
        )
        common_utils.set_rng_seed()
        with cpu_in_place_of_gpu() if variant.plays_gpus else nullcontext():
            getattr(case, test)()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:  # torch's decorators skip a test by ending the process, with a special code
        return ("skipped" if end.code else "failed"), f"exit code {end.code}"
    except BaseException:  # noqa: BLE001 - any error is the outcome of this test, which the driver reports
        return "failed", traceback.format_exc()
    return "passed", ""


def _destroy() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
