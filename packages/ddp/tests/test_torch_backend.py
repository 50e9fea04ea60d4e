"""Our DDP over torch groups that have ours underneath: the adapter is not in between."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import syncline.collectives.torch_backend  # noqa: F401 - registers
from syncline.collectives import TorchGroup
from syncline.collectives.startup.launch import detect_launch
from syncline.ddp import DistributedDataParallel
from syncline.ddp.process_groups import as_ours, choose_group, resolve_group

pytestmark = pytest.mark.skipif(detect_launch(os.environ) is not None, reason="about a process that nothing launched")


@pytest.fixture(autouse=True)
def _torch_world() -> Iterator[None]:
    dist.init_process_group("syncline", init_method="mpi://")
    yield
    dist.destroy_process_group()


def test_a_group_of_ours_is_unwrapped() -> None:
    group = dist.group.WORLD
    assert resolve_group(group) is group.syncline_group
    assert resolve_group(None) is group.syncline_group, "torch's default group"
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    assert as_ours(choose_group(None, mesh)) is group.syncline_group


def test_a_group_of_torchs_is_wrapped() -> None:
    assert isinstance(resolve_group(dist.new_group(backend="gloo")), TorchGroup)


def test_a_module_over_it() -> None:
    module = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=dist.group.WORLD)
    module(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
    assert module.module.weight.grad.tolist() == [[1.0, 2.0, 3.0]]
