"""Stock torch.distributed over backend "mpi": every collective, by torch's own functions."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import syncline.collectives.torch_backend  # noqa: F401 - registers
from syncline.collectives import ProcessGroup
from syncline.collectives.startup.launch import detect_launch
from syncline.collectives.testing import CHECKS, Check
from test_support.through_torch import ThroughTorch

pytestmark = pytest.mark.mpi

# Before they ask the group, torch's functions refuse complex tensors that are only marked as conjugate.
PASSABLE = {name: check for name, check in CHECKS.items() if not name.endswith("lazily_conjugated")}


@pytest.fixture(scope="module")
def through_torch() -> Iterator[ProcessGroup]:
    launch = detect_launch(os.environ)
    if launch is None or launch.world_size != 2:
        pytest.skip("the checks of the suite run on two ranks; the backend below passes them on any number")
    dist.init_process_group("syncline-mpi", init_method="mpi://")
    yield ThroughTorch(timeout_s=30.0)
    dist.destroy_process_group()


@pytest.mark.parametrize("check", PASSABLE.values(), ids=PASSABLE)
def test_conforms_through_torchs_functions(through_torch: ProcessGroup, check: Check) -> None:
    check(through_torch)
