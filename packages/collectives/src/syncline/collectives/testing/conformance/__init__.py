"""Checks of what every process group must do. They run on any backend; see `suite`."""

from .suite import CHECKS, Check, run_conformance

__all__ = ["CHECKS", "Check", "run_conformance"]
