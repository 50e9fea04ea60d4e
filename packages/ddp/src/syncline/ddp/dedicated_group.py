"""A dedicated group: a second group of the same ranks, for collectives without a fixed place in the first group's order."""

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
    """Return a second group of the same ranks, with its own order of calls.

    The first call for a group is a collective of this group.

    Note [A group of its own]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    A layer that communicates in backward does so when autograd reaches it. The moment at which the reducer starts a bucket also
    depends on the parameters that this rank has not used. So layer and reducer have no common order that is the same on every
    rank. In one group this would be a mismatch; in two groups it does no harm. And the layer need not wait for the buckets in
    flight.
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
