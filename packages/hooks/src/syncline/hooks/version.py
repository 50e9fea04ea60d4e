"""The installed version of the package syncline-hooks."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("syncline-hooks")
except PackageNotFoundError:  # on the path, but not installed
    __version__ = "unknown"
