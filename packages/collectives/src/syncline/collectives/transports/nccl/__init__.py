"""NCCL, through CuPy. CuPy is imported only when a program asks whether NCCL works, or connects a group."""

from .backend import NcclBackend, backend

__all__ = ["NcclBackend", "backend"]
