"""Latency and bandwidth of collectives: backends side by side, interleaved in one run."""

from .kinds import KINDS, Buffers, Kind
from .measure import Case, measure
from .results import Measurement
from .subjects import Subject

__all__ = ["KINDS", "Buffers", "Case", "Kind", "Measurement", "Subject", "measure"]
