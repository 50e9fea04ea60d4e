"""Helpers for tests of distributed code: ranks as threads, checks of a backend, and pytest under mpirun."""

from .conformance import CHECKS, Check, run_conformance
from .mpi_version import skip_mpi
from .ranks import run_ranks

__all__ = ["CHECKS", "Check", "run_conformance", "run_ranks", "skip_mpi"]
