"""Train, save, load in new processes: on as many ranks the same bits, on other numbers of ranks the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.collectives.testing.processes import run_processes
from test_support.jobs import LIMIT_S
from test_support.preloaded import OPTIMIZERS

pytestmark = pytest.mark.launch

JOB = Path(__file__).with_name("resume_job.py")
RANKS = 2
# What these send is linear in the gradients: the mean of the ranks' errors is all that matters to them.
LINEAR = ["power", "power cold", "power same shapes", "power unnamed", "batched power", "random", "schedule"]
OTHERS = ["fp16", "power in halves", "int8", "int8 channels", "one-bit", "top"]
LOCAL = "local"
# What these draw or group depends on the layout of the buckets.
TIED_TO_LAYOUT = ["power cold", "batched power", "random", "schedule"]

Found = list[dict[str, dict[str, Any]]]


def run(folder: Path, world_size: int, checkpoints: Path | None = None) -> Found:
    folder.mkdir()
    if checkpoints is not None:
        (folder / "from").symlink_to(checkpoints)
    run_processes(JOB, world_size, folder, timeout_s=LIMIT_S, preload=OPTIMIZERS)
    return [torch.load(folder / f"found-{rank}.pt") for rank in range(world_size)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Found:
    """Uninterrupted; for each rank."""
    return run(folder / "whole", RANKS)


@pytest.fixture(scope="module")
def resumed(folder: Path, whole: Found) -> Found:
    return run(folder / "resumed", RANKS, folder / "whole")


@pytest.fixture(scope="module")
def resized(folder: Path, whole: Found) -> Found:
    return run(folder / "resized", 1, folder / "whole")


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    equal = all(torch.equal(p, q) for p, q in zip(one["parameters"], other["parameters"], strict=True))
    return equal and one["losses"] == other["losses"]


@pytest.mark.parametrize("case", [*LINEAR, *OTHERS, LOCAL])
def test_after_a_rehearsal_losses_and_parameters_are_bitwise_those_of_the_uninterrupted_run(
    whole: Found, resumed: Found, case: str
) -> None:
    for uninterrupted, found in zip(whole, resumed, strict=True):
        assert len(found[case]["losses"]) == 3
        assert is_same(found[case], uninterrupted[case])


@pytest.mark.parametrize("case", [*LINEAR, *OTHERS, LOCAL])
def test_without_a_rehearsal_only_what_is_tied_to_the_layout_of_buckets_differs(
    whole: Found, resumed: Found, case: str
) -> None:
    for uninterrupted, found in zip(whole, resumed, strict=True):
        assert is_same(found[f"{case}, unrehearsed"], uninterrupted[case]) == (case not in TIED_TO_LAYOUT)


def losses_of_the_batch(found: Found, case: str) -> torch.Tensor:
    return torch.tensor([rank[case]["losses"] for rank in found], dtype=torch.float64).mean(0)


@pytest.mark.parametrize("case", LINEAR)
def test_on_another_number_of_ranks_training_goes_on_as_if_uninterrupted(whole: Found, resized: Found, case: str) -> None:
    torch.testing.assert_close(losses_of_the_batch(resized, case), losses_of_the_batch(whole, case), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", OTHERS)
def test_where_each_rank_compresses_its_own_training_goes_on_nearly_as_if_uninterrupted(
    whole: Found, resized: Found, case: str
) -> None:
    torch.testing.assert_close(losses_of_the_batch(resized, case), losses_of_the_batch(whole, case), rtol=0.1, atol=0)
