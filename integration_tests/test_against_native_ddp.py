"""torch's own DistributedDataParallel over Gloo is the oracle: same model, seed and data, the same gradients."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from test_support.full_run import cases

JOB = Path(__file__).with_name("native_ddp_comparison.py")


@pytest.mark.launch
@pytest.mark.parametrize("ranks", cases([3], in_full=[2]))
def test_gradients_and_state_equal_native_ddps(run_job: Callable[..., Any], tmp_path: Path, ranks: int) -> None:
    finished = run_job(ranks, "", str(JOB), str(tmp_path / "rendezvous"))

    assert finished.status == 0, finished.output
    lines = [line.removeprefix("COMPARED ") for line in finished.output.splitlines() if line.startswith("COMPARED ")]
    compared = [json.loads(line) for line in lines]
    cases = {(entry["model"], entry["dtype"], entry["as_view"]) for entry in compared}
    assert len(cases) == len(compared) == 3 * 2 * 2, finished.output
    for entry in compared:
        assert entry["steps"] == 4
        assert entry["names"] >= 6
        # Native DDP divides before it adds, ours after. Halving is exact; a third is rounded.
        assert entry["is_bitwise"] or ranks != 2, entry
