"""A dedicated group is a second group of a group's ranks.

It runs collectives that have no fixed position in the first group's order.
"""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta

import torch.distributed as dist

from syncline.collectives import ProcessGroup, TorchGroup

# Each group has one dedicated group, also if several layers ask. It lives as long as its group. For a group of torch's the key
# is torch's object, because each use of such a group makes a new `TorchGroup`.
_dedicated_groups: weakref.WeakKeyDictionary[object, ProcessGroup] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def dedicated_group(group: ProcessGroup) -> ProcessGroup:
    """Return a second group of this group's ranks, with its own order of calls.

    The first call for a group is a collective of this group.

    Note [A group of its own]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    A layer may communicate in backward, when autograd reaches the layer. The reducer starts a bucket at a moment that also
    depends on the parameters that this rank has not used. So the calls of layer and reducer may have a different order on each
    rank. In one group, different orders would be a mismatch. In two groups they do no harm, and the layer need not wait for the
    buckets in flight.
    """
    key = group if group.torch_group is None else group.torch_group
    with _lock:
        dedicated = _dedicated_groups.get(key)
    if dedicated is None:
        # Not under the lock: ranks as threads share it, and this collective needs all of them.
        dedicated = _make_dedicated_group(group)
        group.end_together(dedicated)
        with _lock:
            _dedicated_groups[key] = dedicated
    return dedicated


def _make_dedicated_group(group: ProcessGroup) -> ProcessGroup:
    # Groups of Syncline can be split. If the group is torch's, torch must make the second one.
    if group.can_split:
        dedicated = group.split(0)
        assert dedicated is not None  # every rank gave a color
        return dedicated
    made = dist.new_group(
        dist.get_process_group_ranks(group.torch_group),
        timeout=timedelta(seconds=group.timeout_s),
        backend=str(dist.get_backend_config(group.torch_group)),
        use_local_synchronization=True,  # only the group's ranks call this
    )
    return TorchGroup(made, name=f"{group.name}/dedicated", timeout_s=group.timeout_s)
