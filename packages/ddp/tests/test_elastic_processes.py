"""Elastic training with real processes that are killed: what is left is what an undisturbed run would have."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from syncline.collectives.testing.processes import run_processes

pytestmark = [pytest.mark.launch, pytest.mark.timeout(400)]

JOB = Path(__file__).with_name("elastic_job.py")
RANKS, EPOCHS, STEPS_IN_EPOCH = 4, 3, 5
MOMENTS = (
    "forward",
    "backward",
    "before the collective",
    "in the collective",
    "before the agreement",
    "before the barrier",
    "after the barrier",
    "after the step",
)
DURING_SHRINK = ("shrink, before connecting", "shrink, after connecting", "before the model is updated")

Kill = tuple[int, int, str]


def run(folder: Path, *, is_reference: bool, killed: Sequence[int] = (), **plan: object) -> dict[int, dict[str, object]]:
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"is_reference": is_reference, "epochs": EPOCHS, **plan}))
    run_processes(JOB, RANKS, folder, killed=frozenset(killed), timeout_s=180)
    return {rank: json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(RANKS) if rank not in killed}


def members_at_each_step(kills: Sequence[Kill], sizes: Sequence[int]) -> list[list[int]]:
    """Who took part in each applied step: a rank that was killed at step s, or in the shrink after it, may have in s."""
    left, members = list(range(RANKS)), []
    order = [rank for rank, _, _ in sorted(kills, key=lambda kill: (kill[1], (*MOMENTS, *DURING_SHRINK).index(kill[2])))]
    for size in sizes:
        while len(left) > size:
            left.remove(order.pop(0))
        members.append(list(left))
    return members


def check(folder: Path, kills: Sequence[Kill], *, views: bool = False) -> None:
    killed = [rank for rank, _, _ in kills]
    survived = run(folder / "elastic", is_reference=False, kills=kills, views=views, killed=killed)
    assert len({result["digest"] for result in survived.values()}) == 1
    assert len({tuple(result["sizes"]) for result in survived.values()}) == 1
    sizes = next(iter(survived.values()))["sizes"]
    assert len(sizes) == EPOCHS * STEPS_IN_EPOCH  # each batch was applied once
    assert sizes[-1] == RANKS - len(kills)
    members = members_at_each_step(kills, sizes)
    expected = run(folder / "reference", is_reference=True, sizes=sizes, members=members, views=views)
    last = members[-1][0]
    assert survived[last]["digest"] == expected[last]["digest"]
    for result in survived.values():
        print("recoveries, in seconds:", [round(s, 3) for s in result["recovery_s"]], "sizes:", sizes)


def test_killed_between_agreement_and_step_and_another_during_the_shrink(tmp_path: Path) -> None:
    check(tmp_path, [(0, 3, "after the barrier"), (2, 3, "shrink, before connecting")])


@pytest.mark.parametrize("seed", range(int(os.environ.get("SYNCLINE_ELASTIC_RUNS", "0"))))
def test_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    """SYNCLINE_ELASTIC_RUNS says how many runs; each takes two jobs of four processes."""
    chosen = random.Random(seed)
    first, second = chosen.sample(range(RANKS), 2)
    step = chosen.randrange(EPOCHS * STEPS_IN_EPOCH - 1)
    kills = [(first, step, chosen.choice(MOMENTS))]
    if chosen.random() < 0.4:
        kills.append((second, step, chosen.choice(DURING_SHRINK)))
    else:
        kills.append((second, chosen.randrange(step, EPOCHS * STEPS_IN_EPOCH - 1), chosen.choice(MOMENTS)))
    print(kills)
    check(tmp_path, kills, views=chosen.random() < 0.5)
