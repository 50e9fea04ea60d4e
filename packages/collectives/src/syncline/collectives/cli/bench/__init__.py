"""Measure latency and bandwidth of collectives on several backends. The backends take turns."""

from .kinds import KINDS, Buffers, Kind
from .measure import Case, measure
from .results import Measurement
from .subjects import Subject

__all__ = ["KINDS", "Buffers", "Case", "Kind", "Measurement", "Subject", "measure"]
