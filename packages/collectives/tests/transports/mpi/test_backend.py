"""What can be said about the MPI backend without an MPI."""

from __future__ import annotations

import sys

import pytest

from syncline.collectives import BackendUnavailableError
from syncline.collectives.startup.backend import ConnectRequest
from syncline.collectives.startup.registry import load_backend
from syncline.collectives.transports.mpi import backend as mpi

module = sys.modules["syncline.collectives.transports.mpi.backend"]


@pytest.fixture
def asked_anew(monkeypatch: pytest.MonkeyPatch):
    module._library_problem.cache_clear()
    yield
    module._library_problem.cache_clear()


def test_no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    sentence = load_backend("mpi").missing()
    assert sentence is not None
    assert "mpi4py is not installed" in sentence
    assert "pip install 'syncline-collectives[mpi]'" in sentence
    assert "pip install 'syncline-collectives[mpich]'" in sentence
    with pytest.raises(BackendUnavailableError, match="backend 'mpi': mpi4py is not installed"):
        mpi.connect(ConnectRequest(None, None, None, None, 5.0))


def test_no_library(monkeypatch: pytest.MonkeyPatch, asked_anew: None) -> None:
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
    assert "syncline-collectives[mpich]" in sentence
    assert "\n" not in sentence
