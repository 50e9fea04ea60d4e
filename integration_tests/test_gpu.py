"""Training on a real GPU against torch's own DDP over torch's own NCCL."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from syncline.collectives import BackendUnavailableError
from syncline.collectives.testing.processes import run_processes
from syncline.collectives.transports.nccl import backend

MISSING = backend.missing()
PARTS = (
    "ddp",
    "ddp_by_device",
    "hooks",
    "sync_batch_norm",
    "native_ddp_over_ours",
    "ddp_over_torchs_nccl",
    "a_captured_step",
    "a_step_does_not_wait_for_the_gpu",
    "forward_on_another_stream",
)
SCRIPT = Path(__file__).with_name("gpu_training.py")
pytestmark = pytest.mark.launch


def test_every_part_is_there() -> None:
    assert all(callable(runpy.run_path(str(SCRIPT))[part]) for part in PARTS)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("size", [1, 2], ids=["one_rank", "two_ranks"])
@pytest.mark.parametrize("part", PARTS)
def test_training(part: str, size: int, tmp_path: Path) -> None:
    if part == "native_ddp_over_ours":
        try:
            import syncline.collectives.torch_bridge  # noqa: F401 - it says which torch it needs
        except BackendUnavailableError as error:
            pytest.skip(str(error))
    (tmp_path / "part").write_text(part)
    run_processes(SCRIPT, size, tmp_path, timeout_s=300.0)
