from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import MisuseError, ProcessGroup, TorchGroup
from syncline.collectives.torch_backend import TorchProcessGroup
from syncline.collectives.transports.threads import create_groups
from syncline.hooks import allreduce_hook, fp16_compress_hook, noop_hook
from syncline.hooks.contract import Bucket, group_of


class FakeBucket:
    """A bucket that knows its caller's group, as our reducer's does, and nothing else."""

    def __init__(self, group: object) -> None:
        self._group = group

    def process_group(self) -> object:
        return self._group


def bucket_of(group: object) -> Any:
    return FakeBucket(group)


def alone() -> ProcessGroup:
    return create_groups(1)[0]


def test_a_torch_group_with_ours_underneath_is_unwrapped() -> None:
    group = alone()

    assert group_of(TorchProcessGroup(group, dist.HashStore(), "syncline"), bucket_of(alone())) is group


def test_a_group_of_ours_is_taken_as_it_is_before_the_buckets() -> None:
    group = alone()

    assert group_of(group, bucket_of(alone())) is group


def test_without_a_state_it_is_the_buckets_group() -> None:
    group = alone()

    assert group_of(None, bucket_of(group)) is group


@pytest.fixture
def torch_world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("torch_world")
def test_a_group_of_torchs_is_seen_as_one_of_ours() -> None:
    group = group_of(dist.group.WORLD, bucket_of(alone()))

    assert isinstance(group, TorchGroup)
    assert group.torch_group is dist.group.WORLD
    tensor = torch.tensor([3.0])
    group.all_reduce(tensor)
    assert tensor.tolist() == [3.0]


@pytest.mark.parametrize("state", [0, "world", torch.zeros(1), object()], ids=["number", "name", "tensor", "object"])
def test_anything_else_is_refused_by_its_type(state: object) -> None:
    with pytest.raises(MisuseError, match=rf"process group \(syncline's or torch's\) or None, found {type(state).__name__}"):
        group_of(state, bucket_of(alone()))


@pytest.mark.parametrize("hook", [allreduce_hook, fp16_compress_hook, noop_hook])
def test_torch_finds_no_annotation_that_it_would_refuse(hook: Any) -> None:
    signature = inspect.signature(hook)

    assert list(signature.parameters)[1] == "bucket", "torch looks it up by this name"
    assert {parameter.annotation for parameter in signature.parameters.values()} == {inspect.Parameter.empty}
    assert signature.return_annotation is inspect.Signature.empty
    assert get_type_hints(hook)["bucket"] is Bucket, "tools still find the types"
