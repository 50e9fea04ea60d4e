"""The version of the installed package syncline-ddp."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("syncline-ddp")
except PackageNotFoundError:  # on the path, but not installed
    __version__ = "unknown"
