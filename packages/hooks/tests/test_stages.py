"""The pipeline of hooks that consist of several collectives."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncline.collectives import CollectiveTimeout, ProcessGroup
from syncline.collectives.transports.threads import create_groups
from syncline.hooks.stages import Pipeline, Stages
from test_support.given_up import forget_failure


def test_a_bucket_is_freed_although_its_collective_has_failed() -> None:
    group = create_groups(2, timeout_s=0.001)[0]
    buffer = torch.ones(4)
    gone = weakref.ref(buffer)

    def stages(over: ProcessGroup, of: torch.Tensor) -> Stages:
        yield over.all_reduce(of, async_op=True)
        return of

    bucket: Any = SimpleNamespace(buffer=lambda of=buffer: of)
    future = Pipeline().run(stages(group, buffer), group, bucket)
    with pytest.raises(CollectiveTimeout):
        future.wait()
    forget_failure(group)
    del group, buffer, bucket, future
    gc.collect()
    assert gone() is None
