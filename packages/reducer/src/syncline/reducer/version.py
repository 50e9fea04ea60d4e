"""The installed version of the package syncline-reducer."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("syncline-reducer")
except PackageNotFoundError:  # on the path, but not installed
    __version__ = "unknown"
