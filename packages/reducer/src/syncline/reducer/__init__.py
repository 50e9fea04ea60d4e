"""Averages gradients over the ranks while backward still computes other gradients.

These files handle each gradient, in this order:

1. `gradient_hooks`: autograd calls the hook on the parameter. The hook records the parameter's index. The hook also calls the
   reducer at the first gradient of a bucket, and when the bucket may have enough gradients.
2. `pending_gradients`: detects when a bucket has enough gradients, and when all users' hooks on the latest gradient have run.
   Then `reducer` asks `usage` which of these gradients are final. A gradient is final if its parameter gets no more gradients
   in this backward.
3. `readiness`: decides which buckets may start. Buckets start strictly in one order, which is the same on every rank.
4. `backward_reduction`: lets each bucket that may start collect its gradients into one flat buffer (`bucket`), and issues the
   reduction of this bucket.
5. `bucket_reduction`: starts `all_reduce(AVG)` or a communication hook. The reduction runs while backward continues.
6. `finalize`: at the end of backward, waits for each bucket, and lets `bucket` write the averages into `.grad`.

All steps run on the thread of backward. The reducer holds its lock during steps 2 to 5.

More files: `sync_policy` says which backwards are reduced. `gradient_aliasing` avoids copies. `bucket_building` makes the
buckets. After a backward has shown the order of the gradients (`arrival_order`), `bucket_building` makes the buckets again, in
this order. `torch_internals` has the private parts of torch that the reducer uses, such as the call at the end of backward.
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
