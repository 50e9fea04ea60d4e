"""Averages gradients over the ranks while backward still computes other gradients.

Each gradient passes these files, in this order:

1. `gradient_hooks`: autograd calls a hook on the parameter, which records the gradient.
2. `pending_gradients`: detects when a bucket has enough gradients. `usage` says which parameters get no more gradients in this
   backward.
3. `readiness`: decides which buckets may start. Buckets start in one order, which is the same on every rank.
4. `backward_reduction`: lets each of these buckets collect its gradients into one flat buffer (`bucket`).
5. `bucket_reduction`: starts `all_reduce(AVG)` or a communication hook. The reduction runs while backward continues.
6. `finalize`: at the end of backward, waits for each bucket, and lets `bucket` write the averages into `.grad`.

All steps run on the thread of backward. The reducer holds its lock during steps 2 to 5.

Other files: `sync_policy` decides which backwards are reduced. `bucket_building` makes the buckets, in the order that
`arrival_order` has learned. `gradient_aliasing` avoids copies. `torch_internals` has the private parts of torch.
"""

from .bucket_assignment import BucketAssignment, GradientSpec, assign_buckets
from .bucket_reduction import CommunicationHook
from .dynamic_usage import DynamicUsage
from .grad_bucket import GradBucket
from .readiness import Readiness
from .reducer import Reducer
from .static_usage import StaticUsage
from .statistics import BucketTimes, IterationStatistics
from .usage import CompleteUsage, UsageModel
from .users_hooks import is_worth_a_look
from .verification import telling_the_others, verify_same_options, verify_same_parameters
from .version import __version__

__all__ = [
    "BucketAssignment",
    "BucketTimes",
    "CommunicationHook",
    "CompleteUsage",
    "DynamicUsage",
    "GradBucket",
    "GradientSpec",
    "IterationStatistics",
    "Readiness",
    "Reducer",
    "StaticUsage",
    "UsageModel",
    "__version__",
    "assign_buckets",
    "is_worth_a_look",
    "telling_the_others",
    "verify_same_options",
    "verify_same_parameters",
]
