"""Stores: small tables of keys and values, through which the processes of a job find each other."""

from .file import FileStore, file_rendezvous, join_latest_run
from .store import PrefixStore, Store
from .table import InMemoryStore
from .tcp import TCPStore, TCPStoreServer, new_secret
from .torch_store import AsTorchStore, FromTorchStore

__all__ = [
    "AsTorchStore",
    "FileStore",
    "FromTorchStore",
    "InMemoryStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TCPStoreServer",
    "file_rendezvous",
    "join_latest_run",
    "new_secret",
]
