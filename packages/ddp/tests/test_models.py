"""Ten structures of models train data-parallel as they do locally; ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline.collectives import ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.ddp.testing import MODELS, check_training
from syncline.reducer import GradBucket

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_local_training_on_the_whole_batch(name: str, world_size: int) -> None:
    run_ranks(world_size, check_training, name)


@pytest.mark.parametrize("name", ["mixture with unused experts", "checkpointed blocks", "channels-last", "lstm"])
def test_also_with_gradients_that_are_views_of_buckets(name: str) -> None:
    def body(group: ProcessGroup) -> None:
        check_training(group, name, gradient_as_bucket_view=True)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("world_size", "options", "complaint"),
    [
        (2, {"forward_sync_buffers": False, "hook": "noop"}, "the replicas differ"),
        (1, {"hook": "double"}, "not close"),
    ],
)
def test_training_that_is_wrong_is_seen(
    world_size: int, options: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that forgets to reduce, and one that reduces wrongly."""
    from syncline.ddp import DistributedDataParallel
    from syncline.ddp.testing import training

    def hook(kind: str, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * (2 if kind == "double" else 1))
        return future

    def with_hook(module: torch.nn.Module, **arguments: Any) -> DistributedDataParallel:
        kind = arguments.pop("hook")
        ddp = DistributedDataParallel(module, **arguments)
        ddp.register_comm_hook(kind, hook)
        return ddp

    monkeypatch.setattr(training, "DistributedDataParallel", with_hook)

    def body(group: ProcessGroup) -> None:
        check_training(group, "nested lists", **options)

    with pytest.raises(AssertionError, match=complaint):
        run_ranks(world_size, body)
