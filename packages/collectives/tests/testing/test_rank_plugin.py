"""The pytest plugin where there is no mpirun; `integration_tests/test_pytest_plugin.py` has the rest."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from syncline.collectives.testing.rank_plugin import RankOutcome, combined

PASSED, SKIPPED, FAILED = (
    RankOutcome("call", "passed"),
    RankOutcome("call", "skipped", "why"),
    RankOutcome("call", "failed", "boom"),
)


@pytest.mark.parametrize("rank_outcomes", [[PASSED], [PASSED] * 3, [SKIPPED] * 2])
def test_agreement(rank_outcomes: list[RankOutcome]) -> None:
    assert combined(rank_outcomes) is None


def test_one_failure_fails_all() -> None:
    assert combined([PASSED, FAILED, SKIPPED]) == "failed on rank(s) 1 of 3\n---- rank 1 of 3 ----\nboom"
    assert combined([FAILED, PASSED, FAILED]) == (
        "failed on rank(s) 0, 2 of 3\n---- rank 0 of 3 ----\nboom\n---- rank 2 of 3 ----\nboom"
    )


def test_ranks_must_do_the_same() -> None:
    assert combined([PASSED, SKIPPED]) == "the ranks did not do the same:\nrank 0: passed\nrank 1: skipped why"


LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "RANK", "WORLD_SIZE")


def test_without_mpirun(python: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.mpi\n"
        "def test_marked(mpi_group): raise RuntimeError('not reached')\n"
        "def test_unmarked(): ...\n"
        "def test_forgotten(mpi_group): ...\n"
        "def test_world_forgotten(world): ...\n"
    )
    plugin = "syncline.collectives.testing.pytest_plugin"
    job = subprocess.run(
        [*python, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "-rs", "--strict-markers", str(tmp_path)],
        env={name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert job.returncode == 1, job.stdout
    assert "1 passed, 1 skipped, 2 errors" in job.stdout
    assert "needs mpirun: mpiexec -n N python -m pytest -m mpi" in job.stdout
    assert job.stdout.count("needs mpirun; mark the test with pytest.mark.mpi") >= 2
    assert "not reached" not in job.stdout.replace("RuntimeError('not reached')", "")
