"""In which order the doctor does what may take long."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.collectives import TransportError
from syncline.collectives.cli.doctor import command
from syncline.collectives.startup.mpi_library import CudaAwareness
from test_support.jobs import LIMIT_S


def test_a_transfer_that_hangs_is_not_taken_for_ranks_that_do_not_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is tried before the ranks connect, and for less time than those without a GPU wait."""
    log: list[tuple[str, float]] = []

    def try_it(*, timeout_s: float) -> CudaAwareness:
        log.append(("try", timeout_s))
        return CudaAwareness(False, "no: it hangs")

    def connect(name: str, *, init_method: str | None, timeout: float) -> Any:
        log.append(("connect", timeout))
        raise TransportError("that is enough")

    monkeypatch.setattr(command, "_starts_mpi", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "what_is_missing", lambda name: None)
    monkeypatch.setattr(command, "try_cuda_awareness", try_it)
    monkeypatch.setattr(command, "init_process_group", connect)
    monkeypatch.setattr(command, "diagnose", lambda ranks, choice, problem, lack, backends: [])
    monkeypatch.setattr(command, "_observe_alone", lambda: None)
    assert command.run(argparse.Namespace(backend="gloo", init_method=None)) == 0
    assert [what for what, _ in log] == ["try", "connect"]
    assert log[0][1] < log[1][1]
    assert "everything is fine" in capsys.readouterr().out


def test_an_init_method_makes_the_doctor_choose_as_a_job_does(tmp_path: Path, python: list[str]) -> None:
    """Without a launcher, an alone process with an init_method uses Gloo."""
    words = [*python, "-m", "syncline.collectives", "doctor", "--init-method", f"file://{tmp_path}/meet"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, "WRONG" in done.stdout) == (0, False), done.stdout


ENDING = """
import argparse, os, signal, sys
from syncline.collectives.cli.doctor import command

def examine(arguments):
    {end}

command._examine = examine
sys.exit(command.run(argparse.Namespace(backend=None, init_method=None)))
"""


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGBUS)", "by signal 7 (Bus error)"),
        ("os._exit(16)", "with status 16"),
        ("os._exit(70)", "because not all ranks were connected within 60 s"),
    ],
)
def test_an_mpi_that_ends_the_process_is_a_finding(end: str, how: str, tmp_path: Path, python: list[str]) -> None:
    environ = {**os.environ, "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "TMPDIR": str(tmp_path)}
    words = [*python, "-c", ENDING.format(end=end)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    said = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stderr
    assert "WRONG MPI cannot be used, though PMI (MPICH, Intel MPI) launched this process" in said, said + done.stderr
    assert how in said
    assert "WRONG connection the process that started MPI" in said


def test_a_doctor_who_could_look_around_is_believed(tmp_path: Path, python: list[str]) -> None:
    environ = {**os.environ, "PMI_RANK": "0", "PMI_SIZE": "2", "TMPDIR": str(tmp_path)}
    words = [*python, "-c", ENDING.format(end="print('findings'); return 1")]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (1, "findings\n"), done.stderr


def test_ranks_that_meet_in_a_folder_survive_the_loss_of_a_rank(tmp_path: Path, python: list[str]) -> None:
    words = [*python, "-m", "syncline.collectives", "doctor", "--backend", "gloo", "--init-method", f"file://{tmp_path}/meet"]
    environ = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    said = []
    for rank in (0, 1):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "TMPDIR": str(tmp_path)}
        said.append(subprocess.Popen(words, env={**environ, **variables}, stdout=subprocess.PIPE, text=True))
    outputs = [" ".join(process.communicate(timeout=LIMIT_S)[0].split()) for process in said]
    assert "loss of a rank this job can survive it" in outputs[0], outputs
    assert outputs[1] == ""


def test_ranks_that_are_not_connected_have_one_who_speaks(tmp_path: Path, python: list[str]) -> None:
    """Whoever comes first: rank 0 may not be there at all."""
    words = [*python, "-m", "syncline.collectives", "doctor", "--backend", "gloo"]
    environ = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    said = []
    for rank in (1, 2):
        variables = {"RANK": str(rank), "WORLD_SIZE": "3", "TMPDIR": str(tmp_path)}
        said.append(subprocess.Popen(words, env={**environ, **variables}, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in said]
    assert [process.returncode for process in said] == [1, 1]
    assert sorted(output.count("backend 'gloo' has 3 ranks and no way") for output in outputs) == [0, 1], outputs
