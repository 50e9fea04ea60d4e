"""The desync catalogue over Gloo: whatever the ranks disagree on, they are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from test_support.desync_programs import NUMELS, catalogue, problem

pytestmark = pytest.mark.launch

TOOLS = Path(__file__).parents[1] / "tools"
PROGRAMS = catalogue()
RANKS = 2
Outcomes = Mapping[tuple[str, str, bool], list[str]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What each rank of each program was told."""
    command = [sys.executable, "-m", "test_support.desync_gloo_job", str(tmp_path_factory.mktemp("desync")), str(RANKS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return {(name, size, checked): said for (name, size, checked), said in json.loads(done.stdout)}


@pytest.mark.parametrize("size", list(NUMELS))
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_disagreement_is_told(outcomes: Outcomes, name: str, size: str) -> None:
    said = outcomes[name, size, False]
    wrong = problem(PROGRAMS[name], said)
    assert wrong is None, f"{wrong}: {said}"


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_disagreement_is_told_with_check_calls(outcomes: Outcomes, name: str) -> None:
    said = outcomes[name, "small", True]
    wrong = problem(PROGRAMS[name], said)
    assert wrong is None, f"{wrong}: {said}"
