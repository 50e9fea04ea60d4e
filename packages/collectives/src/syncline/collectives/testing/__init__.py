"""Helpers for tests with process groups: ranks as threads, conformance checks of backends, and pytest under mpirun."""

from .conformance import CHECKS, Check, run_conformance
from .mpi_version import skip_mpi
from .ranks import run_ranks

__all__ = ["CHECKS", "Check", "run_conformance", "run_ranks", "skip_mpi"]
