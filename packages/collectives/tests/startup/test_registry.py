from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from syncline.collectives import BackendUnavailableError, UnknownBackendError, backend_names
from syncline.collectives.startup.backend import Backend
from syncline.collectives.startup.registry import ENTRY_POINT_GROUP, load_backend

BUILT_IN = ["gloo", "in_process", "mpi"]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a package that offers a backend: a module, and metadata as pip leaves it."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(package: str, entry: str, source: str) -> None:
        (tmp_path / f"{package}.py").write_text(source)
        metadata = tmp_path / f"{package}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{entry}\n")
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, package, raising=False)

    return install


SMOKE = """
from syncline.collectives.startup.backend import Backend

class Smoke(Backend):
    def missing(self):
        return "no fire"
    def connect(self, request):
        raise NotImplementedError

backend = Smoke()
"""


def test_built_in() -> None:
    assert set(BUILT_IN) <= set(backend_names())
    for name in BUILT_IN:
        assert isinstance(load_backend(name), Backend)


def test_third_party_comes_through_the_same_door(install) -> None:
    install("smoke_signals", "smoke = smoke_signals:backend", SMOKE)
    assert "smoke" in backend_names()
    assert load_backend("smoke").missing() == "no fire"


def test_unknown_lists_the_known() -> None:
    with pytest.raises(UnknownBackendError, match=f"unknown backend 'smoke'; installed backends: .*{'.*'.join(BUILT_IN)}"):
        load_backend("smoke")


def test_not_a_backend(install) -> None:
    install("no_backend", "none = no_backend:backend", "backend = 'a string'")
    with pytest.raises(BackendUnavailableError, match=r"'none' of 'syncline.backends' should name an instance .* found str"):
        load_backend("none")


def test_a_class_is_not_an_instance(install) -> None:
    install("class_backend", "klass = class_backend:Smoke", SMOKE)
    with pytest.raises(BackendUnavailableError, match="should name an instance"):
        load_backend("klass")


def test_two_packages_of_one_name(install) -> None:
    install("smoke_one", "smoke = smoke_one:backend", SMOKE)
    install("smoke_two", "smoke = smoke_two:backend", SMOKE)
    with pytest.raises(BackendUnavailableError, match=r"several packages .* smoke_one:backend, smoke_two:backend"):
        load_backend("smoke")


@pytest.mark.parametrize("source", ["import a_package_that_is_not_there", "nothing = 1"])
def test_a_module_that_cannot_be_imported(install, source: str) -> None:
    install("broken_backend", "broken = broken_backend:backend", source)
    with pytest.raises(BackendUnavailableError, match="broken"):
        load_backend("broken")
