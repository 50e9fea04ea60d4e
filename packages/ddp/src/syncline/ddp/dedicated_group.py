"""Make a second group with the same ranks, for collectives that have no fixed order relative to those of the first group."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta

import torch.distributed as dist

from syncline.collectives import ProcessGroup, TorchGroup

# Each group has one dedicated group, also if several layers ask for it. The dedicated group lives as long as the group. For a
# group of torch, the key is torch's object, because each use of a torch group makes a new `TorchGroup`.
_dedicated_groups: weakref.WeakKeyDictionary[object, ProcessGroup] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def dedicated_group(group: ProcessGroup) -> ProcessGroup:
    """Return a second group with the same ranks. The calls in one group may have any order relative to the calls in the other.

    The first call for a group is a collective of this group.

    Note [A group of its own]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    A layer may communicate in backward, when autograd reaches the layer. The reducer also communicates in backward, and may
    start a bucket at different moments on different ranks. So the calls of layer and reducer may have a different order on each
    rank, which would be a disagreement in one group. In two groups, the order does no harm, and the layer need not wait for
    buckets.
    """
    key = group if group.torch_group is None else group.torch_group
    with _lock:
        dedicated = _dedicated_groups.get(key)
    if dedicated is None:
        # Do not hold the lock here. Ranks that are threads share the lock, and this collective needs all ranks.
        dedicated = _make_dedicated_group(group)
        group.end_together(dedicated)
        with _lock:
            _dedicated_groups[key] = dedicated
    return dedicated


def _make_dedicated_group(group: ProcessGroup) -> ProcessGroup:
    # Groups of Syncline can be split. For a group of torch, torch must make the second group.
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
