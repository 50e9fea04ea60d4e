"""Averages gradients over ranks while backward computes: buckets, readiness, finalize."""

from .bucket_assignment import BucketAssignment, GradientSpec, assign_buckets
from .grad_bucket import GradBucket
from .graph import CompleteGraph, Graph
from .readiness import Readiness
from .reducer import Reducer
from .static_graph import StaticGraph
from .statistics import BucketTimes, IterationStatistics
from .used_parameters import ChangingGraph
from .verification import verify_same_options, verify_same_parameters

__all__ = [
    "BucketAssignment",
    "BucketTimes",
    "ChangingGraph",
    "CompleteGraph",
    "GradBucket",
    "GradientSpec",
    "Graph",
    "IterationStatistics",
    "Readiness",
    "Reducer",
    "StaticGraph",
    "assign_buckets",
    "verify_same_options",
    "verify_same_parameters",
]
