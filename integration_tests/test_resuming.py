"""Hooks with a state: saved under mpirun, and resumed by jobs with the same number of ranks and with more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

JOB = Path(__file__).with_name("resuming_job.py")
HOOKS = ["power", "batched power", "int8", "random", "schedule"]
LINEAR = [name for name in HOOKS if name != "int8"]  # their result depends only on the mean of the ranks' errors


@pytest.mark.launch
def test_hooks_resume_bitwise_on_as_many_ranks_and_up_to_rounding_on_more(run_job: Callable[..., Any], tmp_path: Path) -> None:
    def run(ranks: int, name: str, *words: str) -> dict[str, Any]:
        folder = tmp_path / name
        folder.mkdir()
        finished = run_job(ranks, "", str(JOB), str(folder), *words)
        assert finished.status == 0, finished.output
        return torch.load(folder / "found.pt")  # type: ignore[no-any-return]

    whole = run(2, "whole")
    resumed = run(2, "resumed", str(tmp_path / "whole"))
    assert list(whole) == HOOKS
    for name in HOOKS:
        assert resumed[name]["losses"] == whole[name]["losses"], name
        for ours, theirs in zip(resumed[name]["parameters"], whole[name]["parameters"], strict=True):
            assert torch.equal(ours, theirs), name
    on_more = run(3, "on more", str(tmp_path / "whole"))
    for name in HOOKS:
        rtol = 1e-6 if name in LINEAR else 0.05
        torch.testing.assert_close(on_more[name]["losses"], whole[name]["losses"], rtol=rtol, atol=0)
