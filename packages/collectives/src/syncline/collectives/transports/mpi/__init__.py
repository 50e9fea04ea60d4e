"""The backend "mpi", which uses MPI through mpi4py. Syncline imports mpi4py only if a program checks or uses this backend."""

from .backend import backend

__all__ = ["backend"]
