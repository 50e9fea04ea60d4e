"""Averages gradients over ranks while backward computes: buckets, readiness, finalize."""

from .bucket_assignment import BucketAssignment, GradientSpec, assign_buckets
from .grad_bucket import GradBucket
from .readiness import Readiness
from .reducer import Reducer
from .statistics import BucketTimes, IterationStatistics
from .verification import verify_same_parameters

__all__ = [
    "BucketAssignment",
    "BucketTimes",
    "GradBucket",
    "GradientSpec",
    "IterationStatistics",
    "Readiness",
    "Reducer",
    "assign_buckets",
    "verify_same_parameters",
]
