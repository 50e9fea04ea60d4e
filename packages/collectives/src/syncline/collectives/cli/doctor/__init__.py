"""Before a job, tell the user of a cluster what is installed, what is wrong, and how to repair it."""

from .diagnosis import diagnose
from .finding import Finding, Status
from .observation import MPIFacts, Observation

__all__ = ["Finding", "MPIFacts", "Observation", "Status", "diagnose"]
