"""Sets of ranks with fast links inside, and slow links between the sets."""

from __future__ import annotations

from syncline.collectives import MisuseError, ProcessGroup, exchange_objects


class Sites:
    """A group that is divided into sites, such as nodes, racks or data centres.

        site "a":  rank 0   rank 1   rank 2          inside: over fast links
                     │
                  between: over slow links, one rank of each site
                     │
        site "b":  rank 3   rank 4

    Attributes:
        inside: the group of all ranks of this rank's site.
        between: the group of the first ranks of all sites. None on all other ranks.
        number: the number of sites.
        ranks: the number of ranks of all sites together.

    Args:
        group: the Syncline group to divide. The constructor is a collective of this group.
        site: the name of this rank's site.

    Raises:
        MisuseError: the group is a group of torch, which this class cannot split.
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
