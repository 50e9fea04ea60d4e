"""The backend "mpi", which uses MPI through mpi4py. mpi4py is imported only when a program checks or uses this backend."""

from .backend import backend

__all__ = ["backend"]
