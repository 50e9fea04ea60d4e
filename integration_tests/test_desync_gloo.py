"""The desync catalogue over Gloo: every disagreement of the ranks is reported to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from test_support.desync_programs import NUMELS, QUICK, catalogue, problem
from test_support.full_run import FULL

pytestmark = [pytest.mark.launch, *([pytest.mark.timeout(600)] if FULL else [])]

TOOLS = Path(__file__).parents[1] / "tools"
PROGRAMS = catalogue()
NAMES = list(PROGRAMS) if FULL else QUICK
Outcomes = Mapping[tuple[str, str, bool], list[str]]


@pytest.fixture(scope="module", params=[2, 3] if FULL else [2])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The outcome of each rank of each program."""
    folder = str(tmp_path_factory.mktemp("desync"))
    command = [sys.executable, "-m", "test_support.desync_gloo_job", folder, str(request.param), *(["--all"] if FULL else [])]
    path = os.pathsep.join([str(TOOLS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SYNCLINE_REPORT_DIR": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return {(name, size, checked): said for (name, size, checked), said in json.loads(done.stdout)}


@pytest.mark.parametrize("size", list(NUMELS) if FULL else ["small"])
@pytest.mark.parametrize("name", NAMES)
def test_disagreement_is_told(outcomes: Outcomes, name: str, size: str) -> None:
    said = outcomes[name, size, False]
    wrong = problem(PROGRAMS[name], said, compares=False)
    assert wrong is None, f"{wrong}: {said}"


@pytest.mark.parametrize("name", NAMES)
def test_disagreement_is_told_with_check_calls(outcomes: Outcomes, name: str) -> None:
    said = outcomes[name, "small", True]
    wrong = problem(PROGRAMS[name], said, compares=True)
    assert wrong is None, f"{wrong}: {said}"
