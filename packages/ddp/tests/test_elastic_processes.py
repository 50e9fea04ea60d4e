"""Elastic training with real processes that are killed: what is left is what an undisturbed run would have.

`dev.py elastic` does it on digits, at moments drawn at random, as often as one likes.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from syncline.collectives.testing.processes import run_processes
from test_support.full_run import cases
from test_support.preloaded import OPTIMIZERS

pytestmark = [pytest.mark.launch, pytest.mark.timeout(400)]

JOB = Path(__file__).with_name("elastic_job.py")
RANKS, EPOCHS, STEPS_IN_EPOCH = 4, 3, 5

Kill = tuple[int, int, str]


def run(folder: Path, plan: dict[str, object], killed: Sequence[int] = ()) -> dict[int, Any]:
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    run_processes(JOB, RANKS, folder, killed=frozenset(killed), timeout_s=180, preload=OPTIMIZERS)
    return {rank: json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(RANKS) if rank not in killed}


def test_killed_between_agreement_and_step_and_another_during_the_shrink(tmp_path: Path) -> None:
    kills: list[Kill] = [(0, 3, "after the sum"), (2, 3, "shrink, before connecting")]
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


# ---- one that comes later ----


def run_with_newcomer(
    python: list[str], folder: Path, plan: dict[str, object], ranks: int, killed: Sequence[int] = ()
) -> dict[int, Any]:
    """The results by number; the newcomer's is `ranks`."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    newcomer = subprocess.Popen([*python, str(JOB), "join", str(ranks), str(folder)])
    try:
        run_processes(JOB, ranks, folder, killed=frozenset(killed), timeout_s=180, preload=OPTIMIZERS)
        assert newcomer.wait(60) == 0
    finally:
        newcomer.kill()
    return {int(path.stem[7:]): json.loads(path.read_text()) for path in folder.glob("result-*.json")}


def test_a_rank_that_comes_later_has_the_bits_of_one_that_was_given_the_state(python: list[str], tmp_path: Path) -> None:
    plan: dict[str, object] = {"epochs": EPOCHS, "views": True, "kills": [], "ranks": 2, "newcomers_at": [6]}
    results = run_with_newcomer(python, tmp_path / "elastic", plan, 2)
    assert sorted(results) == [0, 1, 2]
    assert len({result["digest"] for result in results.values()}) == 1
    steps = EPOCHS * STEPS_IN_EPOCH
    assert results[0]["sizes"] == [2] * 7 + [3] * (steps - 7)
    assert results[2]["sizes"] == [3] * (steps - 7)
    assert results[2]["began_at"] == 7
    members = results[0]["members"]
    assert members == [[0, 1]] * 7 + [[0, 1, 2]] * (steps - 7)
    folder = tmp_path / "reference"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"plans": [{**plan, "members": members}]}))
    run_processes(JOB, 3, folder, timeout_s=180, preload=OPTIMIZERS)
    assert json.loads((folder / "result-0.json").read_text())[0]["digest"] == results[0]["digest"]


@pytest.mark.parametrize(
    "moment", cases(["shrink, after connecting"], in_full=["shrink, before connecting", "before the model is updated"])
)
def test_a_rank_that_dies_while_another_is_let_in(python: list[str], tmp_path: Path, moment: str) -> None:
    plan: dict[str, object] = {"epochs": EPOCHS, "views": False, "kills": [(1, 6, moment)], "ranks": 3, "newcomers_at": [6]}
    results = run_with_newcomer(python, tmp_path / "elastic", plan, 3, [1])
    assert sorted(results) == [0, 2, 3]
    assert len({result["digest"] for result in results.values()}) == 1
    assert results[0]["sizes"] == [3] * (EPOCHS * STEPS_IN_EPOCH)  # one has gone, one has come
    assert results[0]["lost"] == results[2]["lost"] == [1]


@pytest.mark.parametrize("moment", cases(["after connecting"], in_full=["before connecting"]))
def test_a_newcomer_that_dies_while_it_is_let_in_harms_nobody(python: list[str], tmp_path: Path, moment: str) -> None:
    plan: dict[str, object] = {
        "epochs": EPOCHS,
        "views": False,
        "kills": [],
        "ranks": 2,
        "newcomers_at": [6],
        "newcomer_dies": moment,
    }
    folder = tmp_path / "elastic"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    newcomer = subprocess.Popen([*python, str(JOB), "join", "2", str(folder)])
    try:
        run_processes(JOB, 2, folder, timeout_s=180, preload=OPTIMIZERS)
        assert newcomer.wait(60) == -signal.SIGKILL
    finally:
        newcomer.kill()
    results = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)]
    assert results[0]["digest"] == results[1]["digest"]
    assert results[0]["sizes"] == [2] * (EPOCHS * STEPS_IN_EPOCH)
