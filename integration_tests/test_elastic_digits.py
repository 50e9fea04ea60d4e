"""The digits example, made elastic as in the documentation, goes on when ranks are killed at random times."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_runs import recoveries

pytestmark = pytest.mark.launch

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "packages" / "ddp" / "examples" / "digits"
PAGE = ROOT / "docs" / "howto" / "survive-failures.md"
RANKS, EPOCHS = 4, 25
MEETING = "file:///shared/digits"
# Logs its events at level DEBUG.
PROGRAM = """
import logging, runpy
logging.basicConfig(format="%(created).3f %(message)s")
logging.getLogger("syncline").setLevel(logging.DEBUG)
runpy.run_path("digits.py", run_name="__main__")
"""


def the_diff() -> str:
    return PAGE.read_text().partition("```diff\n")[2].partition("```")[0]


def make_elastic(folder: Path) -> None:
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["patch", "--quiet", "digits.py"], input=the_diff(), text=True, cwd=folder, check=True)
    script = folder / "digits.py"
    assert script.read_text().count(MEETING) == 1
    script.write_text(script.read_text().replace(MEETING, f"file://{folder}/meeting"))


@contextmanager
def ranks_of(folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of a job that is started by hand; rank r prints to `output-r`."""
    made = []
    try:
        for rank in range(RANKS):
            said = (folder / f"output-{rank}").open("w")
            environ = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "unused", "OMP_NUM_THREADS": "1"}
            made.append(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, f"--epochs={EPOCHS}", "--report=report.json"],
                    cwd=folder,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            )
            said.close()
        yield made
    finally:
        for process in made:
            process.kill()
            process.wait()


def wait_for(folder: Path, text: str, rank: int, timeout_s: float = 200.0) -> None:
    end_s = time.monotonic() + timeout_s
    while text not in (folder / f"output-{rank}").read_text():
        assert time.monotonic() < end_s, (folder / f"output-{rank}").read_text()
        time.sleep(0.05)


def processes_in(folder: Path) -> list[int]:
    """The processes whose working folder is this one."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return found


def test_ten_lines_make_it_elastic() -> None:
    changed = [line for line in the_diff().splitlines()[2:] if line.startswith("+")]
    assert 0 < len(changed) <= 10


def test_the_lines_fit_the_example(tmp_path: Path) -> None:
    make_elastic(tmp_path / "digits")
    compile((tmp_path / "digits" / "digits.py").read_text(), "digits.py", "exec")


@pytest.mark.timeout(500)
@pytest.mark.parametrize("seed", range(int(os.environ.get("SYNCLINE_ELASTIC_RUNS", "0"))))
def test_digits_goes_on_when_ranks_are_killed(tmp_path: Path, seed: int) -> None:
    """SYNCLINE_ELASTIC_RUNS is the number of runs, SYNCLINE_ELASTIC_TIMES a file for the times of the recoveries."""
    chosen = random.Random(seed)
    folder = tmp_path / "digits"
    make_elastic(folder)
    killed = chosen.sample(range(RANKS), 2)
    with ranks_of(folder) as processes:
        wait_for(folder, "training:", 0)
        killed_s = []
        for rank in killed:
            time.sleep(chosen.uniform(0.0, 1.5))  # at a random moment of the training
            killed_s.append(time.time())
            processes[rank].kill()
        statuses = [process.wait(200) for process in processes]
    said = {rank: (folder / f"output-{rank}").read_text() for rank in range(RANKS)}
    assert statuses == [-signal.SIGKILL if rank in killed else 0 for rank in range(RANKS)], said
    report = json.loads((folder / "report.json").read_text())
    assert report["ranks"] == RANKS - len(killed)
    assert report["replicas_bitwise_identical"]
    assert report["test_accuracy_percent"] > 95
    assert processes_in(folder) == []
    assert not list(folder.glob("syncline-report-*")), "a loss that the training goes on from writes no report"
    write_times([said[rank] for rank in range(RANKS) if rank not in killed], killed_s)


def write_times(said: Sequence[str], killed_s: Sequence[float]) -> None:
    if "SYNCLINE_ELASTIC_TIMES" in os.environ:
        times = [each for text in said for each in recoveries(text, killed_s)]
        with Path(os.environ["SYNCLINE_ELASTIC_TIMES"]).open("a") as file:
            file.writelines(f"{json.dumps(entry)}\n" for entry in times)
