"""Checks that every process group must pass. They run on any backend. See `suite`."""

from .suite import CHECKS, Check, run_conformance

__all__ = ["CHECKS", "Check", "run_conformance"]
