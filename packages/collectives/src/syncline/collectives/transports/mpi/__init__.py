"""MPI through mpi4py. mpi4py is imported when the first group is connected, not before."""

from .backend import backend

__all__ = ["backend"]
