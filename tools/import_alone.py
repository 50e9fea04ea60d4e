"""Run by wheels.py in a layer's clean environment: LAYER PREFIX EXPECTED_LAYER...

The layer must import from PREFIX, find only the layers it depends on, and not load mpi4py and CuPy.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

LAYERS = ("collectives", "reducer", "hooks", "ddp")


def main(layer: str, prefix: str, *expected: str) -> str | None:
    """The problem, or None."""
    home = importlib.import_module(f"syncline.{layer}").__file__
    if home is None or not Path(home).is_relative_to(prefix):
        return f"syncline.{layer} comes from {home}, expected somewhere under {prefix}"
    found = tuple(name for name in LAYERS if importlib.util.find_spec(f"syncline.{name}"))
    if found != expected:
        return f"importable layers: expected {expected}, found {found}"
    if importlib.util.find_spec("mpi4py"):
        return "mpi4py is importable: this environment proves nothing"
    loaded = {"mpi4py", "cupy"} & set(sys.modules)
    return f"importing syncline.{layer} imported {sorted(loaded)}" if loaded else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
