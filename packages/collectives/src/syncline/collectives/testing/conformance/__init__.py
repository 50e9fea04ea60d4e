"""Checks that every process group must pass, whatever its backend. See `suite`."""

from .suite import CHECKS, Check, run_conformance

__all__ = ["CHECKS", "Check", "run_conformance"]
