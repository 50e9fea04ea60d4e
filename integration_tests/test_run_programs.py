"""`syncline run`: programs written for torchrun, unmodified, give the same losses as under torchrun with Gloo.

The page "Moving from torchrun" lists the results; each of its cells is checked here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest
import torch

from commands import ToolError
from mpi_runtimes import find
from test_support.fixtures import is_installed, python_that_has_loaded
from test_support.full_run import cases
from test_support.jobs import LIMIT_S
from test_support.preloaded import OPTIMIZERS, PreloadedPython

# The first test waits until everything that the programs load was loaded once.
pytestmark = [pytest.mark.launch, pytest.mark.timeout(600)]

PAGE = Path(__file__).parent.parent / "docs" / "moving" / "from-torchrun.md"
PROGRAMS = Path(__file__).parent / "torchrun_programs"
HEADER, *ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().split("## What runs unmodified")[1].split("\n## ")[0].split("\n")
    if line.startswith("|") and not line.startswith("|---")
]
# For each program the page's results for each way to start it, such as "MPICH, 2 ranks".
RESULTS = {row[1].strip("`"): dict(zip(HEADER[2:], row[2:], strict=True)) for row in ROWS}
WAYS = {"MPICH, 2 ranks": ("mpich", 2), "MPICH, 4 ranks": ("mpich", 4), "Open MPI, 2 ranks": ("openmpi", 2)}
USUAL_WAY, *OTHER_WAYS = WAYS
WORDS = {
    "arguments.py": ("arguments.py", "--steps", "4", "--", "-n", "--backend"),
    "package_by_name/": ("-m", "trainer", "--steps", "3"),
}
STDIN = {"reads_stdin.py": b"1.5\n-2.25\n0.1\n"}
STATUS = {"exits_with_3.py": 3}
# multiprocessing finds `__main__` only in a plain Python.
SPAWNS = {"loader_workers.py"}
# The packages that a program needs besides torch, and its module that is slow to load.
NEEDS = {
    "with_accelerate.py": "accelerate",
    "with_deepspeed.py": "deepspeed",
    "with_fabric.py": "lightning_fabric",
    "with_ignite.py": "ignite.distributed",
    "with_lightning.py": "pytorch_lightning",
    "with_torchmetrics.py": "torchmetrics",
    "with_transformers.py": "transformers.trainer",
}
PATIENCE_S = 5.0


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreloadedPython | None]:
    """A Python that has loaded the programs' modules; None in a full run, and if it cannot be started."""
    with python_that_has_loaded((*OPTIMIZERS, *filter(is_installed, NEEDS.values())), tmp_path_factory) as server:
        yield server


def command_line(launcher: Sequence[str], program: str) -> list[str]:
    return [*launcher, *WORDS.get(program, (program,))]


def start(
    launcher: Sequence[str], program: str, stderr: int | IO[bytes] = subprocess.PIPE, **variables: str
) -> subprocess.Popen[bytes]:
    folder = PROGRAMS / program if program.endswith("/") else PROGRAMS
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    words = command_line(launcher, program)
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=folder, env=environ, stdin=pipe, stdout=pipe, stderr=stderr)


def losses(output: bytes) -> list[str]:
    """The lines that begin with "loss", sorted."""
    return sorted(line for line in output.decode().split("\n") if line.startswith("loss"))


def under_torchrun(launcher: Sequence[str], program: str, wanted: int) -> list[str]:
    """The losses that a program prints under torchrun with Gloo, where it sometimes hangs: then it is started once more."""
    for _ in range(2):
        found = once_under_torchrun(launcher, program, wanted)
        if len(found) >= wanted:
            return found
    pytest.fail(f"torchrun printed {len(found)} of {wanted} losses in {LIMIT_S:g} s, twice:\n{found}")


def once_under_torchrun(launcher: Sequence[str], program: str, wanted: int) -> list[str]:
    """As `under_torchrun`, but possibly without the last losses. It may also hang after the last loss; that does no harm."""
    with tempfile.TemporaryFile() as problems, start(launcher, program, problems) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(STDIN.get(program, b""))
        process.stdin.close()
        hangs = threading.Event()

        def end() -> None:
            hangs.set()
            process.terminate()

        ends = threading.Timer(LIMIT_S, end)
        ends.start()
        said: list[bytes] = []
        for line in process.stdout:
            said.append(line)
            if len(losses(b"".join(said))) == wanted:
                break
        ends.cancel()
        more = threading.Timer(PATIENCE_S, process.terminate)
        more.start()
        said.append(process.stdout.read())
        more.cancel()
        process.terminate()
        process.wait()
        problems.seek(0)
        found = losses(b"".join(said))
        assert found or hangs.is_set(), problems.read().decode()
    return found


def check(found: list[str], expected: list[str], claim: str) -> None:
    if claim == "same bits":
        assert found == expected
        return
    assert claim == "same to rounding"
    assert [line.split()[:2] for line in found] == [line.split()[:2] for line in expected]
    for line, other in zip(found, expected, strict=True):
        pattern = r"-?0x[0-9a-f.]+p[+-]\d+"
        assert re.sub(pattern, "", line) == re.sub(pattern, "", other)
        numbers, wanted = ([float.fromhex(text) for text in re.findall(pattern, words)] for words in (line, other))
        torch.testing.assert_close(torch.tensor(numbers), torch.tensor(wanted), rtol=1e-4, atol=1e-6)


def test_every_program_is_in_the_list() -> None:
    found = {path.name for path in PROGRAMS.glob("*.py")} | {f"{path.parent.name}/" for path in PROGRAMS.glob("*/trainer")}
    assert found == RESULTS.keys()
    assert HEADER[2:] == list(WAYS)


@pytest.mark.parametrize("program", RESULTS)
@pytest.mark.parametrize("way", cases([USUAL_WAY], in_full=OTHER_WAYS))
def test_like_torchrun(loaded: PreloadedPython | None, program: str, way: str) -> None:
    if not is_installed(NEEDS.get(program, "torch")):
        pytest.skip(f"{NEEDS[program]} is not installed")
    if RESULTS[program][way].startswith("no: "):
        pytest.skip(RESULTS[program][way])
    mpi, ranks = WAYS[way]
    try:
        runtime = find(mpi)
    except ToolError as error:
        pytest.skip(str(error))
    python = [sys.executable] if loaded is None else loaded.command
    alone = [sys.executable] if loaded is None else loaded.alone
    process = start([*runtime.command(ranks), *python, "-m", "syncline.collectives", "run"], program, **runtime.env)
    try:
        output, problems = process.communicate(STDIN.get(program, b""), timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, problems = process.communicate(timeout=LIMIT_S)
        pytest.fail(f"it did not end within {LIMIT_S:g} s:\n{output.decode()}\n{problems.decode()}")
    assert process.returncode == STATUS.get(program, 0), f"{output.decode()}\n{problems.decode()}"
    found = losses(output)
    worker = [sys.executable] if program in SPAWNS else alone
    torchrun = [*alone, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--no-python", *worker]
    check(found, under_torchrun(torchrun, program, len(found)), RESULTS[program][way])
