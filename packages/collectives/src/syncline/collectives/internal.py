"""What the other layers of Syncline use of this one beyond its public names. Not for other programs: it may change any day."""

from .api.coalescing import DEFAULT_BUFFER_BYTES
from .api.default_group import replace_default_group
from .api.object_exchange import all_gather_bytes, are_same_on_all_ranks, broadcast_object
from .engine.observers import ObservedCall, observe_calls
from .engine.tags import TRACE_CLOCK
from .group import DEFAULT_SILENCE_TIMEOUT_S
from .reduce_op import Reduction
from .startup.algorithm_thresholds import AlgorithmThresholds
from .torch_internals import disable_dynamo, disable_dynamo_here

__all__ = [
    "DEFAULT_BUFFER_BYTES",
    "DEFAULT_SILENCE_TIMEOUT_S",
    "TRACE_CLOCK",
    "AlgorithmThresholds",
    "ObservedCall",
    "Reduction",
    "all_gather_bytes",
    "are_same_on_all_ranks",
    "broadcast_object",
    "disable_dynamo",
    "disable_dynamo_here",
    "observe_calls",
    "replace_default_group",
]
