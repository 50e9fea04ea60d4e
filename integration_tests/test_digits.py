"""The digits example, started as a user does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test_support.full_run import cases
from test_support.jobs import LIMIT_S

pytest.importorskip("sklearn", reason="install syncline-ddp[examples]")

SCRIPT = Path(__file__).parents[1] / "packages" / "ddp" / "examples" / "digits" / "digits.py"
# Open MPI needs these as root and with more ranks than cores; other MPIs do not know them.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}

pytestmark = pytest.mark.launch


def start(*words, ranks=None, python=(sys.executable,)):
    launcher = [] if ranks is None else [mpiexec(), "-n", str(ranks)]
    return subprocess.run(
        [*launcher, *python, str(SCRIPT), *map(str, words)],
        env={**os.environ, **OPEN_MPI},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def mpiexec():
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("there is no mpiexec, neither beside Python nor on PATH")
    return found


@pytest.mark.parametrize("backend", cases(["mpi"], in_full=["gloo"]))
def test_two_ranks_train_and_report(tmp_path, preloaded, backend):
    report, timeline = tmp_path / "report.json", tmp_path / "timeline.png"
    words = ("--epochs", 2, "--backend", backend, "--report", report, "--timeline", timeline)
    ended = start(*words, ranks=2, python=preloaded if backend == "mpi" else (sys.executable,))
    assert ended.returncode == 0, ended.stderr
    read = json.loads(report.read_text())
    assert (read["backend"], read["ranks"], read["nodes"]) == (backend, 2, 1)
    assert read["replicas_bitwise_identical"] is True
    assert 0 < read["first_gradient_largest_relative_difference"] < 1e-5
    assert 50 < read["test_accuracy_percent"] <= 100
    assert 0 <= read["waiting_share_of_step_percent"] < 100
    assert timeline.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ended.stdout.count("replicas identical   yes, bit by bit") == 1
    assert "2/2" in ended.stderr


def test_alone_without_a_launcher(python):
    ended = start("--epochs", 1, python=python)
    assert ended.returncode == 0, ended.stderr
    assert "1 rank on 1 node" in ended.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    cases(
        [(("--batch-size", 97), "--batch-size: expected a multiple of the number of ranks, 2, found 97")],
        in_full=[(("--report", "/no folder/report.json"), "--report: /no folder/report.json cannot be written: No such file")],
    ),
)
def test_what_cannot_be_done_is_said_once_and_before_training(preloaded, words, complaint):
    ended = start(*words, ranks=2, python=preloaded)
    assert ended.returncode == 2
    assert ended.stderr.count(complaint) == 1
    assert "training" not in ended.stderr
