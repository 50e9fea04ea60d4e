"""The rules for imports: `layers.toml` names every module that it should, and refuses the imports that it must refuse."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import ROOT
from environment import LAYERS, PYTHON

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONTRACTS = tomllib.loads((ROOT / "tools" / "layers.toml").read_text())["tool"]["importlinter"]["contracts"]
COLLECTIVES = ROOT / "packages" / "collectives" / "src" / "syncline" / "collectives"

# An added import, and the contract that it breaks.
BAD = [
    ("collectives/api/objects.py", "import syncline.ddp", "Arrows between the layers"),
    ("reducer/readiness.py", "from syncline.hooks import cast", "Arrows between the layers"),
    ("hooks/cast.py", "def f():\n    from syncline.reducer import GradBucket", "Arrows between the layers"),
    ("ddp/join.py", "if TYPE_CHECKING:\n    import syncline.hooks", "ddp does without hooks"),
    ("reducer/readiness.py", "from syncline.collectives.work import Work", "public names of collectives"),
    ("reducer/readiness.py", "from syncline.collectives import engine", "public names of collectives"),
    ("ddp/join.py", "from syncline.collectives.stores.store import PrefixStore", "public names of collectives"),
    ("hooks/cast.py", "from syncline.collectives.transports import gloo", "The registry finds transports"),
    ("collectives/api/objects.py", "from ..transports.threads import SharedState", "The registry finds transports"),
    ("collectives/transports/mpi/library.py", "from .. import threads", "No transport needs another"),
    ("collectives/work.py", "from .group import ProcessGroup", "imports point down"),
    ("collectives/engine/call.py", "from ..health.recorder import Recorder", "imports point down"),
    ("collectives/stores/store.py", "def f():\n    from ..startup import launch", "imports point down"),
    ("collectives/transports/mpi/library.py", "from .transport import MPITransport", "No circles"),
    ("hooks/fragments.py", "from . import diloco", "No circles"),
]


def modules_of(room: str) -> Iterator[str]:
    for path in (COLLECTIVES / room).glob("*.py"):
        if path.stem != "__init__":
            yield f"{room}.{path.stem}"


def test_every_module_of_rooms_with_several_floors_has_one() -> None:
    (floors,) = (contract for contract in CONTRACTS if "exhaustive" in contract)
    named = [name for floor in floors["layers"] for name in floor.split(" | ")]
    for room in floors["exhaustive_ignores"]:
        assert sorted(modules_of(room)) == sorted(name for name in named if name.startswith(f"{room}."))


def test_the_namespace_has_no_init() -> None:
    """A package file there would hide the other layers."""
    assert not [layer for layer in LAYERS if (ROOT / "packages" / layer / "src" / "syncline" / "__init__.py").exists()]


def lint(root: Path) -> tuple[int, str]:
    """The exit status and output of the check for a tree of packages."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(root / "packages" / layer / "src") for layer in LAYERS)}
    command = (PYTHON.parent / "lint-imports", "--config", ROOT / "tools" / "layers.toml", "--no-cache")
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for layer in LAYERS:
        source = Path("packages") / layer / "src"
        shutil.copytree(ROOT / source, root / source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return root


def test_this_tree() -> None:
    status, said = lint(ROOT)
    assert status == 0, said


@pytest.mark.parametrize(("path", "added", "contract"), BAD)
def test_it_refuses(copy: Path, path: str, added: str, contract: str) -> None:
    layer = path.split("/")[0]
    file = copy / "packages" / layer / "src" / "syncline" / path
    text = file.read_text()
    try:
        file.write_text(f"{text}\n{added}\n")
        status, said = lint(copy)
    finally:
        file.write_text(text)
    (name,) = (known["name"] for known in CONTRACTS if contract in known["name"])
    assert status == 1, said
    assert f"{name} BROKEN" in " ".join(said.split()), said  # lines may be broken at the terminal's width
