"""Training on a real GPU against torch's own DDP over torch's own NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.collectives.backends.nccl import backend
from syncline.collectives.testing.processes import run_processes

MISSING = backend.missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.launch,
    pytest.mark.timeout(400),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("part", ["ddp", "ddp_by_device", "hooks"])
def test_training(part: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "part").write_text(part)
    run_processes(Path(__file__).with_name("gpu_training.py"), size, tmp_path, timeout_s=300.0)
