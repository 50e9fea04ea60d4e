from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from check_layering import COLLECTIVES, FLOORS, ROOT, Module, check_source, check_tree, find_circle, import_graph

GOOD = [
    ("syncline.ddp.join", "from syncline.reducer import Reducer"),
    ("syncline.ddp.join", "from syncline import collectives"),
    ("syncline.reducer.bucket", "from syncline.collectives.internal import Reduction"),
    ("syncline.reducer.bucket", "from syncline.collectives.stores import TCPStore"),
    ("syncline.ddp.testing.models", "from syncline.collectives.testing.processes import run_processes"),
    ("syncline.reducer.bucket", "from .readiness import Readiness"),
    ("syncline.hooks.cast", "from syncline.collectives import Work"),
    ("syncline.collectives.api.default_group", "from . import objects"),
    ("syncline.collectives.api.default_group", "from ..startup import registry"),
    ("syncline.collectives.api.default_group", "from .. import errors"),
    ("syncline.collectives.engine.transfer", "from ..contract.work import Work"),
    ("syncline.collectives.__main__", "from .commands.bench.command import run"),
    ("syncline.collectives.api.default_group", "import torch, numpy"),
    ("syncline.collectives.api.default_group", "import synclinear.ddp"),
    ("syncline.collectives.startup.launch", "def probe():\n    import mpi4py"),
    ("syncline.collectives.work", "if TYPE_CHECKING:\n    from mpi4py import MPI"),
    ("syncline.collectives.transports.mpi.progress", "from mpi4py import MPI"),
    ("syncline.collectives.transports.nccl.watchdog", "import cupy.cuda"),
    ("syncline.collectives.stores.tcp.loop", "import zmq"),
    ("syncline.collectives.transports.gloo", "from ..composed.torch_group import TorchGroup"),
    ("syncline.collectives.testing.ranks", "from ..backends.in_process import World"),
]

BAD = [
    ("syncline.collectives.api.default_group", "import syncline.ddp", "may import collectives"),
    ("syncline.collectives.api.default_group", "from syncline import reducer", "found syncline.reducer"),
    ("syncline.reducer.reducer", "from syncline.ddp import x", "found syncline.ddp"),
    ("syncline.reducer.reducer", "from ..hooks import x", "found syncline.hooks"),
    ("syncline.hooks.cast", "from syncline.reducer import GradBucket", "found syncline.reducer"),
    ("syncline.ddp.join", "def f():\n    import syncline.hooks", "found syncline.hooks"),
    ("syncline.ddp.join", "if TYPE_CHECKING:\n    import syncline.hooks", "found syncline.hooks"),
    ("syncline.collectives.startup.launch", "from mpi4py import MPI", "found mpi4py at module level"),
    ("syncline.collectives.startup.launch", "try:\n    import cupy\nexcept E: ...", "found cupy"),
    ("syncline.collectives.transports.nccl.x", "import mpi4py", "found mpi4py"),
    ("syncline.collectives.backends.mpi_like", "import mpi4py", "found mpi4py"),
    ("syncline.collectives.stores.torch_store", "from zmq import Context", "found zmq at module level"),
    ("syncline.hooks.cast", "class C:\n    import cupy", "found cupy"),
    ("syncline.collectives.api.default_group", "from ..backends.mpi import x", "ask the registry"),
    ("syncline.collectives.api.default_group", "from .. import backends", "ask the registry"),
    ("syncline.collectives.work", "from ..host.transport import Transport", "contract lies below host"),
    ("syncline.collectives.work", "from .. import host", "contract lies below host"),
    ("syncline.collectives.work", "def f():\n    from ..stores import Store", "contract lies below stores"),
    ("syncline.collectives.work", "if TYPE_CHECKING:\n    from ..stores import Store", "contract lies below stores"),
    ("syncline.collectives.errors", "from .contract import work", "errors lies below contract"),
    ("syncline.collectives.testing.ranks", "from .. import ProcessGroup", "ProcessGroup has no floor"),
    ("syncline.collectives.attic.work", "from ..contract import work", "attic has no floor"),
    ("syncline.reducer.bucket", "import syncline.collectives.work", "private to collectives"),
    ("syncline.reducer.bucket", "from syncline.collectives.work import Work", "private to collectives"),
    ("syncline.reducer.bucket", "from syncline.collectives import contract", "private to collectives"),
    ("syncline.ddp.join", "from syncline.collectives.torch_internals import disable_dynamo", "private to collectives"),
    ("syncline.ddp.join", "from syncline.collectives.stores.prefix import PrefixStore", "private to collectives"),
]


@pytest.mark.parametrize(("name", "source"), GOOD)
def test_allowed(name: str, source: str) -> None:
    assert check_source(source, Module(name)) == []


@pytest.mark.parametrize(("name", "source", "message"), BAD)
def test_refused(name: str, source: str, message: str) -> None:
    (violation,) = check_source(source, Module(name))
    assert message in violation.message


def test_a_backend_is_neither_public_nor_imported_by_name() -> None:
    private, backend = check_source("import syncline.collectives.transports.gloo", Module("syncline.ddp.join"))
    assert "private to collectives" in private.message
    assert "ask the registry" in backend.message


def test_every_module_at_the_top_has_a_floor() -> None:
    top = ROOT / "packages/collectives/src/syncline/collectives"
    found = {path.stem for path in top.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__"} == set(FLOORS[COLLECTIVES])


CIRCLES = {
    "none": ({"a": "from . import b", "b": "import os", "c": "from .a import x\nfrom .b import y"}, None),
    "two": ({"a": "from .b import x", "b": "from . import a"}, {"a", "b"}),
    "three, beside others": ({"a": "from .b import x", "b": "from .c import x", "c": "from . import a, d", "d": ""}, {*"abc"}),
    "in a function": ({"a": "from . import b", "b": "def f():\n    from . import a"}, {"a", "b"}),
    "for type checkers": ({"a": "from . import b", "b": "if TYPE_CHECKING:\n    from .a import A"}, {"a", "b"}),
    "through a package": (
        {"a": "from .p import x", "p.__init__": "from .m import x", "p.m": "from ..a import y"},
        {"a", "p", "p.m"},
    ),
}


@pytest.mark.parametrize(("sources", "members"), CIRCLES.values(), ids=CIRCLES.keys())
def test_circles(sources: dict[str, str], members: set[str] | None) -> None:
    package = "syncline.collectives.contract"
    modules = {
        Module(f"{package}.{name.removesuffix('.__init__')}", is_package=name.endswith(".__init__")): text
        for name, text in sources.items()
    }
    circle = find_circle(import_graph(modules))
    assert (circle is None) == (members is None)
    if circle is not None and members is not None:
        assert {name.removeprefix(f"{package}.") for name in circle} == members
        assert circle[0] == circle[-1]
        graph = import_graph(modules)
        assert all(after in graph[before] for before, after in pairwise(circle))


def test_a_tree_with_a_circle_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "packages/hooks/src/syncline/hooks"
    package.mkdir(parents=True)
    (package / "a.py").write_text("from .b import x\n")
    (package / "b.py").write_text("from .a import y\n")
    (line,) = check_tree(tmp_path)
    assert line.startswith("circle of imports: syncline.hooks.")


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
