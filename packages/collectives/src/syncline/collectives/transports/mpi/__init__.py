"""MPI through mpi4py. mpi4py is imported only when a program asks whether MPI works, or connects a group."""

from .backend import backend

__all__ = ["backend"]
