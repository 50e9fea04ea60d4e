"""The part of the desync catalogue that may end the job: see Note [What a library does with garbled messages].

Each program is a job of its own, so it takes minutes: `dev.py test --full`, or SYNCLINE_TEST_FULL=1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from test_support.desync_programs import ENDED, catalogue, problem
from test_support.full_run import FULL

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not FULL, reason="minutes of jobs: run it by dev.py test --full, or SYNCLINE_TEST_FULL=1"),
]

TOOLS = Path(__file__).parents[1] / "tools"
PROGRAMS = {name: program for name, program in catalogue().items() if program.garbles}


@pytest.mark.parametrize("ranks", [2, 3], ids=["two ranks", "three ranks"])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_small_disagreement_between_nodes_is_told(run_job: Callable[..., Any], tmp_path: Path, name: str, ranks: int) -> None:
    path = os.pathsep.join([str(TOOLS), *sys.path])
    words = ("-m", "test_support.desync_mpi_job", str(tmp_path), name, "small")
    finished = run_job(ranks, "", *words, PYTHONPATH=path, SYNCLINE_REPORT_DIR="")
    paths = [tmp_path / f"rank-{rank}" for rank in range(ranks)]
    said = [path.read_text() if path.exists() else ENDED for path in paths]
    wrong = problem(PROGRAMS[name], said, compares=False)
    assert wrong is None, f"{wrong}: {said}; {finished.output}"
    assert ENDED not in said or finished.status != 0
