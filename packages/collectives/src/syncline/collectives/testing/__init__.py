"""For tests of and over process groups: ranks as threads, the conformance checks, pytest under mpirun."""

from .conformance import CHECKS, Check, run_conformance
from .mpi_version import skip_mpi
from .ranks import run_ranks

__all__ = ["CHECKS", "Check", "run_conformance", "run_ranks", "skip_mpi"]
