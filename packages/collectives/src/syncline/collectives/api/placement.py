"""Find out which ranks of a group share a node.

The ranks ask each other, and do not read variables such as LOCAL_RANK. These are the launcher's view of the whole job; a group
may be a part of the job, may mix launchers, or may have no launcher.
"""

from __future__ import annotations

import weakref

from ..group import ProcessGroup
from ..startup.nodes import Placement, host_identity, place
from .default_group import resolve_group
from .object_exchange import exchange_objects


def placement_of(group: ProcessGroup | None = None) -> Placement:
    """Find out which ranks of a group share a node. A collective: every rank of the group calls it.

    Cost: an `exchange_objects` of a few hundred bytes at each call. Keep the result if you need it again.

    Args:
        group: the default group if None.
    """
    chosen = resolve_group(group)
    return place(chosen.rank, exchange_objects(host_identity(), group=chosen))


def get_local_rank(group: ProcessGroup | None = None) -> int:
    """This process's number among the ranks of the group on its node, from 0.

    The first call for a group is a collective: every rank of the group calls it. Later calls return the remembered number.

    Args:
        group: the default group if None.
    """
    return _remembered(group).local_rank


def get_local_size(group: ProcessGroup | None = None) -> int:
    """How many ranks of the group are on this process's node. A collective at the first call, as `get_local_rank`.

    Args:
        group: the default group if None.
    """
    return _remembered(group).local_world_size


def get_node_rank(group: ProcessGroup | None = None) -> int:
    """The number of this process's node among the nodes of the group, from 0, in the order of their lowest ranks.

    The first call for a group, of this function or of `get_local_rank`, is a collective: every rank of the group calls it.

    Args:
        group: the default group if None.
    """
    return _remembered(group).node


_placements: weakref.WeakKeyDictionary[ProcessGroup, Placement] = weakref.WeakKeyDictionary()


def _remembered(group: ProcessGroup | None) -> Placement:
    chosen = resolve_group(group)
    found = _placements.get(chosen)
    if found is None:
        found = _placements[chosen] = placement_of(chosen)
    return found
