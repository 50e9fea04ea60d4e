"""Find out which ranks of a group share a node.

The ranks tell each other their hosts in `init_process_group`. They do not read variables such as LOCAL_RANK, which are the
launcher's view of the whole job: a group may be a part of the job, may mix launchers, or may have no launcher.
"""

from __future__ import annotations

import weakref

from ..group import ProcessGroup
from ..startup.nodes import Placement, from_words, host_identity, place
from .default_group import resolve_group
from .object_exchange import exchange_objects

_placements: weakref.WeakKeyDictionary[ProcessGroup, Placement] = weakref.WeakKeyDictionary()


def placement_of(group: ProcessGroup | None = None) -> Placement:
    """Which ranks of a group share a node.

    It does not communicate for the default group and groups that were made from it. For a group of torch.distributed, and after
    a loss or an admission of ranks, it is a collective at the first call for a group: every rank of the group calls it.

    Args:
        group: the default group if None.
    """
    chosen = resolve_group(group)
    found = _placements.get(chosen)
    if found is None:
        found = _placements[chosen] = _find(chosen)
    return found


def _find(group: ProcessGroup) -> Placement:
    if group.size == 1:
        return place(0, [host_identity()])
    # The ranks have not exchanged their hosts: for example, a group of torch, or a group after a loss or an admission.
    if group.hosts is None:
        return place(group.rank, exchange_objects(host_identity(), group=group))
    return place(group.rank, [from_words(group.hosts[rank]) for rank in group.ranks])


def get_local_rank(group: ProcessGroup | None = None) -> int:
    """This process's number among the ranks of the group on its node, from 0. Communicates as rarely as `placement_of`.

    Args:
        group: the default group if None.
    """
    return placement_of(group).local_rank


def get_local_size(group: ProcessGroup | None = None) -> int:
    """How many ranks of the group are on this process's node. Communicates as rarely as `placement_of`.

    Args:
        group: the default group if None.
    """
    return placement_of(group).local_world_size


def get_node_rank(group: ProcessGroup | None = None) -> int:
    """The number of this process's node among the nodes of the group, from 0, in the order of their lowest ranks.

    Communicates as rarely as `placement_of`.

    Args:
        group: the default group if None.
    """
    return placement_of(group).node
