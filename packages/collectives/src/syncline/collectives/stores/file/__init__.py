"""A store in a folder that all processes can reach."""

from .meeting import meet
from .store import FileStore

__all__ = ["FileStore", "meet"]
