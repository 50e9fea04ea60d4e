"""The backend "nccl", which uses NCCL through CuPy. CuPy is imported only when a program checks or uses this backend."""

from .backend import NcclBackend, backend

__all__ = ["NcclBackend", "backend"]
