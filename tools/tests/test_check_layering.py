from __future__ import annotations

from pathlib import Path

import pytest

from check_layering import ROOT, Module, check_source, check_tree

GOOD = [
    ("syncline.ddp.join", "from syncline.reducer import Reducer"),
    ("syncline.ddp.join", "from syncline import collectives"),
    ("syncline.reducer.bucket", "import syncline.collectives.contract.work"),
    ("syncline.reducer.bucket", "from .readiness import Readiness"),
    ("syncline.hooks.cast", "from syncline.collectives import Work"),
    ("syncline.collectives.default_group.default_group", "from . import registry"),
    ("syncline.collectives.default_group.default_group", "import torch, numpy"),
    ("syncline.collectives.default_group.default_group", "import synclinear.ddp"),
    ("syncline.collectives.startup.launch", "def probe():\n    import mpi4py"),
    ("syncline.collectives.contract.work", "if TYPE_CHECKING:\n    from mpi4py import MPI"),
    ("syncline.collectives.backends.mpi.progress", "from mpi4py import MPI"),
    ("syncline.collectives.backends.nccl.watchdog", "import cupy.cuda"),
    ("syncline.collectives.backends.gloo", "from .torch_group import TorchGroup"),
    ("syncline.collectives.startup.registry", "from syncline.collectives.backends import in_process"),
    ("syncline.collectives.testing.ranks", "from ..backends.in_process import World"),
]

BAD = [
    ("syncline.collectives.default_group.default_group", "import syncline.ddp", "may import collectives"),
    ("syncline.collectives.default_group.default_group", "from syncline import reducer", "found syncline.reducer"),
    ("syncline.reducer.reducer", "from syncline.ddp import x", "found syncline.ddp"),
    ("syncline.reducer.reducer", "from ..hooks import x", "found syncline.hooks"),
    ("syncline.hooks.cast", "from syncline.reducer import GradBucket", "found syncline.reducer"),
    ("syncline.ddp.join", "def f():\n    import syncline.hooks", "found syncline.hooks"),
    ("syncline.ddp.join", "if TYPE_CHECKING:\n    import syncline.hooks", "found syncline.hooks"),
    ("syncline.collectives.startup.launch", "from mpi4py import MPI", "found mpi4py at module level"),
    ("syncline.collectives.startup.launch", "try:\n    import cupy\nexcept E: ...", "found cupy"),
    ("syncline.collectives.backends.nccl.x", "import mpi4py", "found mpi4py"),
    ("syncline.collectives.backends.mpi_like", "import mpi4py", "found mpi4py"),
    ("syncline.hooks.cast", "class C:\n    import cupy", "found cupy"),
    ("syncline.collectives.default_group.default_group", "from ..backends.mpi import x", "ask the registry"),
    ("syncline.collectives.default_group.default_group", "from .. import backends", "ask the registry"),
    ("syncline.ddp.join", "import syncline.collectives.backends.gloo", "ask the registry"),
]


@pytest.mark.parametrize(("name", "source"), GOOD)
def test_allowed(name: str, source: str) -> None:
    assert check_source(source, Module(name)) == []


@pytest.mark.parametrize(("name", "source", "message"), BAD)
def test_refused(name: str, source: str, message: str) -> None:
    (violation,) = check_source(source, Module(name))
    assert message in violation.message


def test_the_line_is_that_of_the_import() -> None:
    (violation,) = check_source("import os\n\nimport syncline.ddp\n", Module("syncline.hooks.cast"))
    assert violation.line == 3


def test_a_relative_import_in_a_package_starts_at_the_package() -> None:
    package = Module("syncline.collectives", is_package=True)
    (violation,) = check_source("from .backends import mpi", package)
    assert "ask the registry" in violation.message


@pytest.mark.parametrize("source", ['"""Docstring."""', "from .a import b", '__all__ = ["b"]', "__all__: list[str] = []"])
def test_init_may_reexport(source: str) -> None:
    assert check_source(source, Module("syncline.ddp", is_package=True)) == []


@pytest.mark.parametrize("source", ["x = 1", "def f(): ...", "f()", "if x:\n    import os"])
def test_init_may_do_nothing_else(source: str) -> None:
    package = Module("syncline.ddp", is_package=True)
    assert [violation.line for violation in check_source(source, package)] == [1]
    assert check_source(source, Module("syncline.ddp.join")) == []


def test_the_namespace_has_no_init(tmp_path: Path) -> None:
    stray = tmp_path / "packages" / "hooks" / "src" / "syncline" / "__init__.py"
    stray.parent.mkdir(parents=True)
    assert check_tree(tmp_path) == []
    stray.touch()
    (line,) = check_tree(tmp_path)
    assert line.startswith("packages/hooks/src/syncline/__init__.py:1:")


def test_a_tree_is_read_to_its_leaves(tmp_path: Path) -> None:
    leaf = tmp_path / "packages/collectives/src/syncline/collectives/stores/tcp.py"
    leaf.parent.mkdir(parents=True)
    leaf.write_text("import os\nfrom ...ddp import x\n")
    (line,) = check_tree(tmp_path)
    assert line.startswith("packages/collectives/src/syncline/collectives/stores/tcp.py:2:")


def test_this_tree() -> None:
    assert check_tree(ROOT) == []
