"""Accelerate's own test scripts, over backend "syncline" of torch.distributed.

    mpiexec -n 2 python accelerate_scripts.py

They assert by themselves. Prints "PASSED SCRIPT on rank R" after each.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module

import torch.distributed as dist

import syncline.collectives.torch_backend  # noqa: F401 - registers

SCRIPTS = ("test_ops", "test_sync", "test_script")


def run(script: str) -> None:
    """Run one script in a group of its own, which the script destroys."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    dist.init_process_group("syncline", init_method="mpi://")
    rank = dist.get_rank()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)  # test_ops does not say that it wants the CPU
    import_module(f"accelerate.test_utils.scripts.{script}").main()
    assert not dist.is_initialized()
    sys.stdout.write(f"PASSED {script} on rank {rank}\n")


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    warnings.simplefilter("ignore")
    for name in SCRIPTS:
        run(name)
