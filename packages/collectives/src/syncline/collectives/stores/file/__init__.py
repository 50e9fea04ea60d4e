"""A store in a folder that all processes can reach."""

from .rendezvous import file_rendezvous
from .store import FileStore

__all__ = ["FileStore", "file_rendezvous"]
