"""torch's own DistributedDataParallel over Gloo is the oracle for what surrounds a step: no_sync, join, buffers, optimizers."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.collectives.testing.processes import run_processes
from test_support.full_run import cases
from test_support.jobs import LIMIT_S
from test_support.preloaded import OPTIMIZERS

JOB = Path(__file__).with_name("native_features_job.py")
NETWORK = 14  # parameters and buffers
GRADIENTS = 11
NATIVE_IS_OLD = "forward_sync_buffers" not in inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
HALVES_TOLERANCE = 2e-3


@pytest.fixture(scope="module", params=cases([2], in_full=[3]), ids="{}-ranks".format)
def by_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    world_size, folder = request.param, tmp_path_factory.mktemp("job")
    run_processes(JOB, world_size, folder, timeout_s=LIMIT_S, preload=OPTIMIZERS)
    return [json.loads((folder / f"compared-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.launch
@pytest.mark.parametrize(
    ("scenario", "tensors"),
    [
        ("forward outside, backward inside", GRADIENTS),
        ("forward inside, backward outside", 2 * GRADIENTS),
        ("forwards on both sides", 4 * GRADIENTS),
        ("accumulation with errors", 3 * GRADIENTS),
        ("join", 2 * NETWORK),
        ("join, small buckets, views", 2 * NETWORK),
        ("join, divided by those present", 2 * NETWORK),
        ("join, unused parameters", 2 * NETWORK),
        ("join, static graph", 2 * NETWORK),
        ("join, hook", 2 * NETWORK),
        ("join, local buffers", 2 * NETWORK),
        ("join, accumulation", NETWORK),
        ("join, two models", 2 * NETWORK),
        ("join, disabled", NETWORK),
        ("buffer hook before", NETWORK),
        ("buffer hook after", NETWORK),
        ("fused SGD", NETWORK),
        ("fused Adam", NETWORK),
        ("fused in part", NETWORK),
        ("optimizer in backward", NETWORK + GRADIENTS - 1),
        ("built-in ALLREDUCE", NETWORK),
        ("built-in FP16_COMPRESS", NETWORK),
        ("another group", NETWORK),
    ],
)
def test_it_equals_native_ddps(by_rank: list[dict[str, Any]], scenario: str, tensors: int) -> None:
    # Native DDP divides before it adds, ours after; halving is exact.
    tolerance = 0.0 if len(by_rank) == 2 else 2e-5
    for compared in by_rank:
        if NATIVE_IS_OLD and compared[scenario]["error"] == "torch's own DDP cannot":
            pytest.skip("this torch's own DDP cannot")
        assert compared[scenario]["tensors"] == tensors
        assert compared[scenario]["error"] is None
        assert compared[scenario]["difference"] <= (HALVES_TOLERANCE if "FP16" in scenario else tolerance)


@pytest.mark.launch
def test_both_end_early_where_asked(by_rank: list[dict[str, Any]]) -> None:
    assert {compared["join, early termination"]["error"] for compared in by_rank} == {"early termination"}
