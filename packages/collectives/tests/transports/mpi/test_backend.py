"""What can be said about the MPI backend without an MPI."""

from __future__ import annotations

import subprocess
import sys

import pytest

from syncline.collectives import BackendUnavailableError
from syncline.collectives.startup import mpi_library as module
from syncline.collectives.startup.backend import ConnectRequest
from syncline.collectives.startup.registry import load_backend
from syncline.collectives.transports.mpi import backend as mpi
from test_support.jobs import LIMIT_S


@pytest.fixture
def asked_anew(monkeypatch: pytest.MonkeyPatch):
    module._library_problem.cache_clear()
    yield
    module._library_problem.cache_clear()
    if "mpi4py.MPI" not in sys.modules:  # what finds it was put into `sys.meta_path` during the test, and is gone
        for name in [name for name in sys.modules if name.startswith("mpi4py")]:
            del sys.modules[name]


def test_no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    sentence = load_backend("mpi").missing()
    assert sentence is not None
    assert "mpi4py is not installed" in sentence
    assert "pip install mpi4py`" in sentence
    assert "pip install mpi4py mpich`" in sentence
    with pytest.raises(BackendUnavailableError, match="backend 'mpi': mpi4py is not installed"):
        mpi.connect(ConnectRequest(None, None, None, None, 5.0))


def test_no_library(monkeypatch: pytest.MonkeyPatch, asked_anew: None) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")

    class Loader:
        """Fails as mpi4py does where the library cannot be loaded."""

        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "mpi4py.MPI":
                raise RuntimeError("cannot load MPI library\nlibmpi.so: no such file")

    for name in [name for name in sys.modules if name.startswith("mpi4py")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(sys, "meta_path", [Loader(), *sys.meta_path])
    sentence = mpi.missing()
    assert sentence is not None
    if "mpi4py finds no MPI library" not in sentence:
        pytest.fail(sentence)
    assert "module load" in sentence
    assert "MPI4PY_LIBMPI" in sentence
    assert "pip install mpi4py mpich`" in sentence
    assert sentence.endswith("The loader said: cannot load MPI library libmpi.so: no such file")
    assert len(sentence.splitlines()[0]) <= 200


LOADING = """
import sys
import mpi4py
from syncline.collectives.startup.registry import what_is_missing

{before}
assert what_is_missing("mpi") is None
from mpi4py import MPI
print(MPI.Is_initialized(), mpi4py.rc.initialize, mpi4py.rc.finalize)
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [
        # The library is loaded, and not started: it may be one that the launcher cannot start.
        ("", "False True None"),
        ("mpi4py.rc.finalize = False", "False True False"),
        ("mpi4py.rc.initialize = False", "False False None"),
        ("import mpi4py.MPI", "True True None"),
    ],
)
def test_to_look_for_mpi_does_not_start_it_and_leaves_mpi4py_as_it_was_told(before: str, said: str, python: list[str]) -> None:
    pytest.importorskip("mpi4py")
    program = LOADING.format(before=before)
    done = subprocess.run([*python, "-c", program], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.strip() == said, done.stderr


def test_an_mpi_that_the_program_has_ended_is_not_started_again(python: list[str]) -> None:
    pytest.importorskip("mpi4py")
    program = """
from mpi4py import MPI
from syncline.collectives import LaunchError, init_process_group
MPI.Finalize()
try:
    init_process_group("mpi")
except LaunchError as error:
    print(error)
"""
    done = subprocess.run([*python, "-c", program], capture_output=True, text=True, timeout=LIMIT_S)
    assert "MPI was finalized, and a process cannot start it again" in done.stdout, done.stderr
