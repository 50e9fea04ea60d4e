"""MPI through mpi4py, which is imported when a group is first connected, not before."""

from .backend import backend

__all__ = ["backend"]
