"""Tells a cluster user before a job what is installed, what is wrong, and what to do about it."""

from .diagnosis import diagnose
from .finding import Finding, Status
from .observation import MPIFacts, Observation

__all__ = ["Finding", "MPIFacts", "Observation", "Status", "diagnose"]
