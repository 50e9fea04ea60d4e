"""A store in a folder that all processes can reach."""

from .rendezvous import file_rendezvous, join_latest_run, leave_run
from .store import FileStore

__all__ = ["FileStore", "file_rendezvous", "join_latest_run", "leave_run"]
