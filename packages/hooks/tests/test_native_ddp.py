"""Our hooks under torch's own DistributedDataParallel, held against torch's own hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from syncline.collectives.testing.processes import run_processes
from test_support.full_run import cases
from test_support.jobs import LIMIT_S
from test_support.preloaded import OPTIMIZERS

pytestmark = pytest.mark.launch

JOB = Path(__file__).with_name("native_ddp_job.py")
Gradients = dict[str, list[list[torch.Tensor]]]


@pytest.fixture(scope="module", params=cases([2], in_full=[1]), ids="{}-ranks".format)
def by_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Gradients]:
    """What every rank found, by the hook's name."""
    world_size, folder = request.param, tmp_path_factory.mktemp("job")
    run_processes(JOB, world_size, folder, timeout_s=LIMIT_S, preload=OPTIMIZERS)
    return [torch.load(folder / f"gradients-{rank}.pt") for rank in range(world_size)]


def differ(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> bool:
    return not all(torch.equal(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("name", ["allreduce", "allreduce-group"])
def test_allreduce_gives_what_torch_gives(by_rank: list[Gradients], name: str) -> None:
    for found in by_rank:
        torch.testing.assert_close(found[name], found["torch-allreduce"], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(found[name], found["none"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["fp16", "fp16-group"])
def test_fp16_gives_what_torch_gives_up_to_the_rounding_of_halves(by_rank: list[Gradients], name: str) -> None:
    for found in by_rank:
        torch.testing.assert_close(found[name], found["torch-fp16"], rtol=2e-3, atol=1e-4)
        torch.testing.assert_close(found[name], found["none"], rtol=2e-3, atol=1e-4)
        assert differ(found[name], found["none"]), "not compressed at all"
        first = found[name][0][0]
        assert first.dtype == torch.float32
        assert torch.equal(first, first.half().float())


@pytest.mark.parametrize("name", ["bf16", "wrapped-bf16"])
def test_bf16_gives_what_torch_gives_up_to_the_rounding_of_bfloat16(by_rank: list[Gradients], name: str) -> None:
    for found in by_rank:
        torch.testing.assert_close(found[name], found["torch-bf16"], rtol=2e-2, atol=1e-3)
        assert differ(found[name], found["none"]), "not compressed at all"
        first = found[name][0][0]
        assert torch.equal(first, first.bfloat16().float())


@pytest.mark.parametrize("name", ["wrapped-fp16", "torch-wraps-ours", "ours-wraps-torch"])
def test_wrappers_and_hooks_of_both_kinds_mix(by_rank: list[Gradients], name: str) -> None:
    for found in by_rank:
        torch.testing.assert_close(found[name], found["torch-fp16"], rtol=2e-3, atol=1e-4)
        assert differ(found[name], found["none"]), "not compressed at all"


@pytest.mark.parametrize("name", ["allreduce", "allreduce-group", "fp16", "fp16-group", "bf16", "wrapped-fp16", "wrapped-bf16"])
def test_all_ranks_hold_the_same_bits(by_rank: list[Gradients], name: str) -> None:
    for found in by_rank[1:]:
        assert not differ(found[name], by_rank[0][name])


def test_noop_lets_the_ranks_drift_apart(by_rank: list[Gradients]) -> None:
    for found in by_rank[1:]:
        assert differ(found["noop"], by_rank[0]["noop"])
    assert differ(by_rank[0]["noop"], by_rank[0]["none"]) == (len(by_rank) > 1)


@pytest.mark.parametrize("name", ["int8", "one-bit", "top", "random", "schedule"])
def test_compressed_all_ranks_hold_the_same_bits(by_rank: list[Gradients], name: str) -> None:
    for found in by_rank:
        assert differ(found[name], found["none"]), "not compressed at all"
        assert not differ(found[name], by_rank[0][name])


def test_int8_is_close_to_the_uncompressed_in_the_first_step(by_rank: list[Gradients]) -> None:
    for ours, theirs in zip(by_rank[0]["int8"][0], by_rank[0]["none"][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=float(theirs.abs().max()) / 40)


def test_a_schedule_changes_the_hook_at_its_step(by_rank: list[Gradients]) -> None:
    for found in by_rank:
        torch.testing.assert_close(found["schedule"][0], found["none"][0])
        assert differ(found["schedule"][1:2], found["none"][1:2])


def test_post_local_sgd_averages_until_its_start(by_rank: list[Gradients]) -> None:
    for found in by_rank:
        torch.testing.assert_close(found["post-local"][:2], found["none"][:2])
    for found in by_rank[1:]:
        assert differ(found["post-local"][2:], by_rank[0]["post-local"][2:])


def test_diloco_takes_torchs_groups(by_rank: list[Gradients]) -> None:
    for found in by_rank:
        assert not differ(found["diloco"], by_rank[0]["diloco"])
        assert not differ(found["diloco-group"], by_rank[0]["diloco"])
        assert differ(found["diloco"], found["diloco-not-synchronised"])


@pytest.mark.parametrize("name", ["averaged", "averaged-group", "averaged-wrapped"])
def test_a_hierarchy_divides_torchs_groups_also_as_groups_of_ours(by_rank: list[Gradients], name: str) -> None:
    mean = (len(by_rank) - 1) / 2
    for rank, found in enumerate(by_rank):
        assert [parameter.item() for (parameter,) in found[name]] == [mean, 10 + rank, 20 + rank, 30 + rank, 40 + mean]
