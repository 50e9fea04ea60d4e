"""What the other layers of Syncline use of this one beyond its public names. Not for other programs: it may change any day."""

from .contract.object_exchange import all_gather_bytes
from .contract.reduce_op import Reduction
from .default_group.default_group import replace_default_group
from .torch_internals import disable_dynamo, disable_dynamo_here

__all__ = ["Reduction", "all_gather_bytes", "disable_dynamo", "disable_dynamo_here", "replace_default_group"]
