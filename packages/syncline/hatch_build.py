"""Compute the dependencies of the distribution `syncline`: its four layers, each with the version of `syncline`.

The layers are not on a package index, so `pip install ./packages/syncline` must find them in the checkout. In a checkout, each
requirement names the layer's folder. A package index refuses such requirements. So if SYNCLINE_RELEASE is set, each requirement
names the version. In a source distribution, which does not contain the layers, each requirement also names the version.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LAYERS = ("collectives", "reducer", "hooks", "ddp")
# Each extra of `syncline`, and the layer whose extra of the same name it brings.
EXTRAS = {
    "mpi": "collectives",
    "mpich": "collectives",
    "openmpi": "collectives",
    "store": "collectives",
    "nccl-cuda12": "collectives",
    "nccl-cuda13": "collectives",
    "report": "ddp",
}


class LayersAsDependencies(MetadataHookInterface):
    """Sets `dependencies` and `optional-dependencies`. Hatchling calls `update` each time Hatchling needs the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the requirements to the table `project`."""
        folder = None if os.environ.get("SYNCLINE_RELEASE") else Path(self.root).parent
        metadata["dependencies"] = [requirement(layer, metadata["version"], folder) for layer in LAYERS]
        metadata["optional-dependencies"] = {
            extra: [requirement(layer, metadata["version"], folder, f"[{extra}]")] for extra, layer in EXTRAS.items()
        }


def requirement(layer: str, version: str, packages: Path | None, extra: str = "") -> str:
    """Return the requirement for a layer: its folder in `packages` if this folder exists, otherwise its version."""
    home = packages and packages / layer
    if home and (home / "pyproject.toml").is_file():
        return f"syncline-{layer}{extra} @ {home.as_uri()}"
    return f"syncline-{layer}{extra}=={version}"
