"""Sites: sets of ranks with fast links inside a set, and slow links between the sets."""

from __future__ import annotations

from syncline.collectives import MisuseError, ProcessGroup, exchange_objects


class Sites:
    """A group that is divided into sites, such as nodes, racks or data centres.

        site "a":  rank 0   rank 1   rank 2          inside: every step, over fast links
                     │
                  between: every H steps, over slow links, one rank of each site
                     │
        site "b":  rank 3   rank 4

    Attributes:
        inside: a group of the ranks of this rank's site, ordered as in `group`.
        between: a group of the first rank of each site; None on all other ranks.
        number: how many sites there are.
        ranks: how many ranks the group has.

    Args:
        group: the group to divide, which must be a group of Syncline. The constructor is a collective of the group.
        site: the name of this rank's site.

    Raises:
        MisuseError: the group is a group of torch, which cannot be split here.
    """

    def __init__(self, group: ProcessGroup, site: str) -> None:
        if not group.can_split:
            raise MisuseError("expected a process group of Syncline's to divide into sites, found one of torch's")
        # Sites are numbered in the order of their first ranks, so the list is the same on all ranks.
        labels = list(dict.fromkeys(exchange_objects(site, group=group)))
        inside = group.split(labels.index(site))
        assert inside is not None
        self.inside = inside
        # Every rank calls `split`, because it is a collective. A rank that passes None joins no group.
        self.between = group.split(0 if inside.rank == 0 else None)
        self.number = len(labels)
        self.ranks = group.size
