"""torch's own communication hooks on our DDP, over a group of torch.distributed: same results as on torch's DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.collectives.testing.processes import run_processes
from test_support.jobs import LIMIT_S
from test_support.preloaded import OPTIMIZERS

pytestmark = pytest.mark.launch

JOB = Path(__file__).with_name("torch_hooks_job.py")
LOSSY = ["fp16", "bf16", "fp16 wrapper", "bf16 wrapper", "fp16 wrapped power", "power", "batched power", "local", "noop"]


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("job")
    run_processes(JOB, 2, folder, timeout_s=LIMIT_S, preload=OPTIMIZERS)
    return [torch.load(folder / f"found-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", ["allreduce", *LOSSY])
def test_gradients_are_bitwise_native_ddps(by_rank: list[dict[str, Any]], name: str) -> None:
    for found in by_rank:
        native, *ours = found[name]
        assert len(native) == 5 * 6
        for way in ours:
            assert all(torch.equal(a, b) for a, b in zip(native, way, strict=True))
    exact, lossy = by_rank[0]["allreduce"][1], by_rank[0][name][1]
    assert all(torch.equal(a, b) for a, b in zip(exact, lossy, strict=True)) == (name not in LOSSY), "the hook did nothing"


@pytest.mark.parametrize("name", ["int8", "int8 channels"])
def test_torchs_quantization_hooks_do_not_run_over_gloo_on_torchs_ddp_either(by_rank: list[dict[str, Any]], name: str) -> None:
    """If this fails, torch has fixed them, and they belong to the test above."""
    for found in by_rank:
        assert "IndexError" in found[name]
