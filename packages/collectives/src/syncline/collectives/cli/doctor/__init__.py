"""`syncline doctor` checks a cluster before a job, and names problems and remedies."""

from .diagnosis import diagnose
from .finding import Finding, Status
from .observation import MPIFacts, Observation

__all__ = ["Finding", "MPIFacts", "Observation", "Status", "diagnose"]
