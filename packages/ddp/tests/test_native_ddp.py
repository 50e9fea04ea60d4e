"""torch's own DistributedDataParallel over Gloo is the oracle, feature by feature; ours runs over the same torch group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from syncline.collectives.testing.processes import run_processes
from test_support.full_run import cases
from test_support.jobs import LIMIT_S
from test_support.preloaded import OPTIMIZERS

JOB = Path(__file__).with_name("native_ddp_job.py")
# By case: how many gradients rank 0 saw, and how many were None.
EXPECTED_NONES = {"experts": True, "several outputs": True, "checkpointed": True}


@pytest.fixture(scope="module", params=cases([2], in_full=[3]), ids="{}-ranks".format)
def by_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    world_size, folder = request.param, tmp_path_factory.mktemp("job")
    run_processes(JOB, world_size, folder, timeout_s=LIMIT_S, preload=OPTIMIZERS)
    return [json.loads((folder / f"compared-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.launch
@pytest.mark.parametrize(
    "case",
    [
        "experts",
        "experts, as view",
        "experts, accumulated",
        "several outputs",
        "sparse",
        "sparse, unused allowed",
        "checkpointed",
        "checkpointed, as view",
        "recurrent",
        "tied",
        "tied, hooked",
        "tied, hooked, static, as view",
        "channels last",
        "ignoring",
    ],
)
def test_gradients_and_state_equal_native_ddps(by_rank: list[dict[str, Any]], case: str) -> None:
    for found in by_rank:
        compared = found[case]
        assert compared["steps"] == 5
        assert compared["gradients"] + compared["nones"] == 5 * compared["names"]
        assert (compared["nones"] > 0) == EXPECTED_NONES.get(case.split(",")[0], False)
        # Native DDP divides before it adds, ours after; halving is exact.
        assert compared["difference"] <= (0.0 if len(by_rank) == 2 else 2e-5)
