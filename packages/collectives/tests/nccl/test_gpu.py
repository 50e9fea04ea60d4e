"""On a real GPU: each part on one rank, and on two, which share the GPU if there is only one."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.collectives.backends.nccl import backend
from syncline.collectives.testing.processes import run_processes

MISSING = backend.missing()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400), pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

SCRIPT = Path(__file__).with_name("gpu_rank.py")
PARTS = (
    "conformance",
    "waiting_orders_streams",
    "a_wait_with_a_timeout_blocks",
    "callbacks_run_after_the_collective",
    "memory_in_flight_is_not_reused",
    "memory_does_not_pile_up",
    "a_cuda_graph",
    "coalesced",
    "a_rank_that_does_not_come",
)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("part", PARTS)
def test_on_gpu(part: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "parts").write_text(part)
    run_processes(SCRIPT, size, tmp_path, timeout_s=300.0)
