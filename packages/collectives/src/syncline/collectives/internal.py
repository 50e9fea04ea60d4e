"""Names for the packages ddp, reducer and hooks only. Programs must not use these names: they may change at any time."""

from .api.coalescing import DEFAULT_BUFFER_BYTES
from .api.default_group import replace_default_group
from .api.object_exchange import all_gather_bytes, are_same_on_all_ranks, broadcast_object, message_device
from .engine.observers import ObservedCall, observe_calls
from .engine.tags import TRACE_CLOCK
from .forks import Inherited, not_the_rank, tell_in_forks
from .group import DEFAULT_SILENCE_TIMEOUT_S
from .health.report import read_each
from .reduce_op import Reduction
from .startup.settings import AlgorithmThresholds
from .tensors.checks import is_list
from .tensors.layout import bytes_of, in_plain_order, mark_written, overlaps_itself
from .torch_internals import copy_each, disable_dynamo, disable_dynamo_here
from .work import fail_future, future_for_torch, new_future

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
    "copy_each",
    "disable_dynamo",
    "disable_dynamo_here",
    "fail_future",
    "future_for_torch",
    "in_plain_order",
    "is_list",
    "mark_written",
    "message_device",
    "new_future",
    "not_the_rank",
    "observe_calls",
    "overlaps_itself",
    "read_each",
    "replace_default_group",
    "tell_in_forks",
]
