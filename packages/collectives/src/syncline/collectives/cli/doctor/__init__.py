"""What a cluster user needs to know before a job: what is there, what is wrong, and what to do about it."""

from .diagnosis import diagnose
from .finding import Finding, Status
from .observation import MPIFacts, Observation

__all__ = ["Finding", "MPIFacts", "Observation", "Status", "diagnose"]
