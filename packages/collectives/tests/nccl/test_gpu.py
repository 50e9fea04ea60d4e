"""On a real GPU: each part on one rank, and on two, which share the GPU if there is only one."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from syncline.collectives.testing.processes import run_processes
from syncline.collectives.transports.nccl import backend
from test_support.fake_nccl_group import run_on_fakes

MISSING = backend.missing()
SCRIPT = Path(__file__).with_name("gpu_rank.py")
# These also make sense where a fake takes the place of the GPU.
ON_FAKES = (
    "a_wait_with_a_timeout_blocks",
    "callbacks_run_after_the_collective",
    "memory_in_flight_is_not_reused",
    "coalesced",
    "transfers",
    "calls_that_differ",
)
PARTS = (
    *ON_FAKES,
    "conformance",
    "waiting_orders_streams",
    "memory_does_not_pile_up",
    "a_cuda_graph",
    "closing_with_a_graph_alive",
    "a_second_gpu_is_refused",
    "a_rank_that_does_not_come",
)


def on_gpu(function):
    """Marks a test that needs one."""
    for mark in (
        pytest.mark.gpu,
        pytest.mark.timeout(400),
        pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    ):
        function = mark(function)
    return function


@on_gpu
@pytest.mark.parametrize("size", [1, 2], ids=["one_rank", "two_ranks"])
@pytest.mark.parametrize("part", PARTS)
def test_on_gpu(part: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "parts").write_text(part)
    run_processes(SCRIPT, size, tmp_path, timeout_s=300.0)


@on_gpu
def test_a_peer_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parts").write_text("a_peer_that_is_killed")
    run_processes(SCRIPT, 2, tmp_path, timeout_s=300.0, killed=frozenset({1}))


@on_gpu
def test_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "parts").write_text("the_others_go_on")
    run_processes(SCRIPT, 3, tmp_path, timeout_s=300.0, killed=frozenset({2}))


@on_gpu
def test_two_ranks_on_one_gpu_by_accident(tmp_path: Path) -> None:
    (tmp_path / "parts").write_text("two_ranks_on_one_gpu_by_accident")
    run_processes(SCRIPT, 2, tmp_path, timeout_s=300.0)


@pytest.mark.ranks
@pytest.mark.parametrize("part", ON_FAKES)
def test_on_fakes(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the parts say is true of the fakes, too; so the parts are sound where no GPU is."""
    for name in ("_sleep", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    body = runpy.run_path(str(SCRIPT))[part]
    run_on_fakes(2, lambda group: body(group, torch.device("cpu")))


def test_every_part_is_there() -> None:
    assert all(callable(runpy.run_path(str(SCRIPT))[part]) for part in PARTS)
