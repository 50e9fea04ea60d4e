"""The installed version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("syncline-collectives")
except PackageNotFoundError:  # the code is on the path, but not installed
    __version__ = "unknown"
