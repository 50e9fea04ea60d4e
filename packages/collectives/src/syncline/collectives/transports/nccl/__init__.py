"""NCCL, through CuPy. CuPy is imported when a group is connected, not before."""

from .backend import NcclBackend, backend

__all__ = ["NcclBackend", "backend"]
