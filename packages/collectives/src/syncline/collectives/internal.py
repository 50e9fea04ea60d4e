"""What the other layers of Syncline use of this one beyond its public names. Not for other programs: it may change any day."""

from .contract.call_observer import ObservedCall, observe_calls
from .contract.layout import bytes_of, in_plain_order, mark_written, overlaps_itself
from .contract.object_exchange import all_gather_bytes, are_same_on_all_ranks, broadcast_object
from .contract.process_group import DEFAULT_SILENCE_TIMEOUT_S
from .contract.reduce_op import Reduction
from .contract.reserved_tags import TRACE_CLOCK
from .contract.work import future_for_torch
from .default_group.coalescing import DEFAULT_BUFFER_BYTES
from .default_group.default_group import replace_default_group
from .forks import Inherited, not_the_rank, tell_in_forks
from .host.serial_group import expect_losses
from .startup.algorithm_thresholds import AlgorithmThresholds
from .torch_internals import disable_dynamo, disable_dynamo_here

__all__ = [
    "DEFAULT_BUFFER_BYTES",
    "DEFAULT_SILENCE_TIMEOUT_S",
    "TRACE_CLOCK",
    "AlgorithmThresholds",
    "Inherited",
    "ObservedCall",
    "Reduction",
    "all_gather_bytes",
    "are_same_on_all_ranks",
    "broadcast_object",
    "bytes_of",
    "disable_dynamo",
    "disable_dynamo_here",
    "expect_losses",
    "future_for_torch",
    "in_plain_order",
    "mark_written",
    "not_the_rank",
    "observe_calls",
    "overlaps_itself",
    "replace_default_group",
    "tell_in_forks",
]
