"""The gallery: every script of `examples/` with two ranks on MPICH learns, and leaves the same bits on all ranks.

`test_slurm.py` runs the batch files.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from test_support.fixtures import is_installed, python_that_has_loaded
from test_support.full_run import cases
from test_support.jobs import LIMIT_S
from test_support.preloaded import OPTIMIZERS, PreloadedPython

# The first test waits until everything that the scripts load was loaded once.
pytestmark = [pytest.mark.launch, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
RUNNER = Path(__file__).with_name("example_runner.py")
PAGE = ROOT / "docs" / "examples.md"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
MOST_LINES = 119
NEEDS = {
    "elastic.py": ("sklearn",),
    "hf_trainer.py": ("transformers", "accelerate"),
    "image_classification.py": ("sklearn",),
    "lightning_trainer.py": ("pytorch_lightning", "sklearn"),
}
# Modules that are slow to load.
LOADED = ("sklearn.datasets", "transformers.trainer", "pytorch_lightning")


@dataclass(frozen=True)
class Case:
    script: str
    words: tuple[str, ...] = ()
    falls: str = "loss"
    """What is smaller at the end. A generator and a discriminator push each other's losses up."""


CASES = {
    "image_classification": Case("image_classification.py", ("--epochs", "2")),
    "small_gpt": Case("small_gpt.py", ("--epochs", "2")),
    "small_gpt, bf16": Case("small_gpt.py", ("--epochs", "2", "--hook", "bf16", "--accumulate", "1")),
    "small_gpt, powersgd": Case("small_gpt.py", ("--epochs", "2", "--hook", "powersgd")),
    "gan": Case("gan.py", ("--epochs", "4"), falls="distance"),
    "fsdp2": Case("fsdp2.py", ("--epochs", "2")),
    "elastic": Case("elastic.py", ("--epochs", "2", "--meet", "meeting")),
    "lightning_trainer": Case("lightning_trainer.py", ("--epochs", "2")),
    "hf_trainer": Case("hf_trainer.py", ("--epochs", "2")),
}
IN_FULL = "small_gpt, bf16"


def skip_without_what_it_needs(script: str) -> None:
    for package in NEEDS.get(script, ()):
        if not is_installed(package):
            pytest.skip(f"{script} needs {package}, which is not installed; docs/examples.md says how to install it")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreloadedPython | None]:
    """A Python that has loaded the scripts' modules; None in a full run, and if it cannot be started."""
    with python_that_has_loaded((*OPTIMIZERS, *filter(is_installed, LOADED)), tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="module")
def preloaded(loaded: PreloadedPython | None) -> list[str]:
    """The command that `run_job` starts in place of Python."""
    return [sys.executable] if loaded is None else loaded.command


def values(output: str, name: str) -> list[float]:
    """A number of each epoch, in the order in which they were printed."""
    return [float(number) for number in re.findall(rf"(?m)^epoch \d+: .*?\b{name} ([\d.]+)", output)]


def digests(output: str) -> list[str]:
    return re.findall(r"(?m)^digest (\w{64})$", output)


@pytest.mark.parametrize("name", cases([name for name in CASES if name != IN_FULL], in_full=[IN_FULL]))
def test_it_learns_and_the_replicas_are_equal(run_job, name: str) -> None:
    case = CASES[name]
    skip_without_what_it_needs(case.script)
    job = run_job(2, "", str(RUNNER), str(EXAMPLES / case.script), *case.words, timeout_s=LIMIT_S)
    assert job.status == 0, job.output
    assert len(re.findall(r"(?m)^2 ranks\b", job.output)) == 1, job.output
    found = values(job.output, case.falls)
    assert len(found) == int(case.words[1]), job.output
    assert found[-1] < 0.9 * found[0], job.output
    assert len(digests(job.output)) == 2, job.output
    assert len(set(digests(job.output))) == 1, job.output


def test_a_resumed_training_has_the_bits_of_one_that_was_not_interrupted(run_job, tmp_path: Path) -> None:
    skip_without_what_it_needs("image_classification.py")
    script = str(EXAMPLES / "image_classification.py")
    found = []
    for epochs, checkpoint in ((1, "cut.pt"), (2, "cut.pt"), (2, "whole.pt")):
        job = run_job(2, "", str(RUNNER), script, f"--epochs={epochs}", f"--checkpoint={checkpoint}", timeout_s=LIMIT_S)
        assert job.status == 0, job.output
        found.append((digests(job.output)[0], re.findall(r"(?m)^epoch (\d+)", job.output)))
    (early, first), (resumed, second), (uninterrupted, both) = found
    assert (first, second, both) == (["1"], ["2"], ["1", "2"])
    assert early != resumed == uninterrupted


def test_a_training_goes_on_without_a_rank_that_was_killed(loaded: PreloadedPython | None, tmp_path: Path) -> None:
    """Started as in the script's docstring."""
    skip_without_what_it_needs("elastic.py")
    python = [sys.executable] if loaded is None else loaded.alone
    words = ["--meet", "meeting", "--kill", "1", "--epochs", "3"]
    ranks = [
        subprocess.Popen(
            [*python, str(RUNNER), str(EXAMPLES / "elastic.py"), *words],
            cwd=tmp_path,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "none", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL, 0], outputs
    assert "3 ranks at the start" in outputs[0]
    assert "ranks at the end: 2, lost: 1" in outputs[0]
    found = values(outputs[0], "loss")
    assert len(found) == 3
    assert found[-1] < 0.9 * found[0]
    assert digests(outputs[1]) == []
    assert digests(outputs[0]) == digests(outputs[2]) != []


def test_every_script_has_a_case() -> None:
    assert {case.script for case in CASES.values()} == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_says_how_to_start_it(script: str) -> None:
    text = (EXAMPLES / script).read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert re.search(rf"(?m)^    .*\bpython {re.escape(script)}", text.split('"""')[1]), "the docstring has the command"
    assert text.endswith('\n\nif __name__ == "__main__":\n    main()\n'), "the command does what the tests run"


@pytest.mark.parametrize("path", sorted((EXAMPLES / "slurm").iterdir()), ids=lambda path: path.name)
def test_a_batch_file_says_how_to_submit_it(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert lines[2].startswith(f"# sbatch slurm/{path.name} ")
    assert max(map(len, lines)) <= 90, "the page shows no more columns"
    assert subprocess.run(["bash", "-n", path]).returncode == 0


def test_the_page_has_every_script_and_every_batch_file() -> None:
    text = PAGE.read_text()
    paths = [*SCRIPTS, *(f"slurm/{path.name}" for path in (EXAMPLES / "slurm").iterdir())]
    assert [path for path in paths if f'--8<-- "examples/{path}"' not in text] == []
