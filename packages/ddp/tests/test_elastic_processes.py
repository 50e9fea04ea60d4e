"""Elastic training with real processes that are killed: what is left is what an undisturbed run would have.

`dev.py elastic` does it on digits, at moments drawn at random, as often as one likes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from syncline.collectives.testing.processes import run_processes

pytestmark = [pytest.mark.launch, pytest.mark.timeout(400)]

JOB = Path(__file__).with_name("elastic_job.py")
RANKS, EPOCHS, STEPS_IN_EPOCH = 4, 3, 5

Kill = tuple[int, int, str]


def run(folder: Path, plan: dict[str, object], killed: Sequence[int] = ()) -> dict[int, Any]:
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    run_processes(JOB, RANKS, folder, killed=frozenset(killed), timeout_s=180)
    return {rank: json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(RANKS) if rank not in killed}


def test_killed_between_agreement_and_step_and_another_during_the_shrink(tmp_path: Path) -> None:
    kills: list[Kill] = [(0, 3, "after the barrier"), (2, 3, "shrink, before connecting")]
    plan: dict[str, object] = {"epochs": EPOCHS, "views": False, "kills": kills}
    survived = run(tmp_path / "elastic", plan, [rank for rank, _, _ in kills])
    assert len({result["digest"] for result in survived.values()}) == 1
    assert len({tuple(result["sizes"]) for result in survived.values()}) == 1
    sizes = survived[1]["sizes"]
    assert len(sizes) == EPOCHS * STEPS_IN_EPOCH  # each batch was applied once
    assert set(sizes) == {4, 2}
    members = [[0, 1, 2, 3] if size == 4 else [1, 3] for size in sizes]
    expected = run(tmp_path / "reference", {"plans": [{**plan, "members": members}]})
    assert survived[1]["digest"] == expected[1][0]["digest"]
    for result in survived.values():
        print("recoveries, in seconds:", [round(s, 3) for s in result["recovery_s"]], "sizes:", sizes)
