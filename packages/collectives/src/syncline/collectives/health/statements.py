"""What many ranks say, in few words: those who say the same are named together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from ..errors import DisagreementError, with_details

_MOST_TOLD = 8  # different texts
_LISTED_RUN = 3  # so many neighbours are shown one by one


class Statements:
    """What ranks say; the first that is heard of a rank counts.

    Attributes:
        ranks: for each text the ranks that say it.
        untold: ranks that say something else, which nobody has passed on so far.
        heard: all of them.
    """

    def __init__(self) -> None:
        self.ranks: dict[str, list[int]] = {}
        self.untold: set[int] = set()
        self.heard: set[int] = set()

    @classmethod
    def of(cls, texts: Sequence[str]) -> Statements:
        """What each rank says, by rank."""
        said = cls()
        for rank, text in enumerate(texts):
            said.add(text, [rank])
        return said

    def add(self, text: str, ranks: Iterable[int]) -> None:
        """These ranks say that."""
        new = [rank for rank in ranks if rank not in self.heard or rank in self.untold]
        if new:
            self.heard.update(new)
            self.untold.difference_update(new)
            self.ranks.setdefault(text, []).extend(new)

    def packed(self) -> str:
        """The texts of most ranks, and of all others that they have said something, as text for `add_packed`."""
        texts = sorted(self.ranks, key=lambda text: -len(self.ranks[text]))
        told = [(text, runs(sorted(self.ranks[text]))) for text in texts[:_MOST_TOLD]]
        rest = self.untold.union(*(self.ranks[text] for text in texts[_MOST_TOLD:]))
        return json.dumps({"told": told, "untold": runs(sorted(rest))})

    def add_packed(self, text: str) -> None:
        """Add what another one's `packed` says."""
        said = json.loads(text)
        for line, told in said["told"]:
            self.add(line, ranks_of(told))
        self.untold.update(rank for rank in ranks_of(said["untold"]) if rank not in self.heard)
        self.heard.update(self.untold)

    def in_words(self) -> str:
        """In words: "ranks 0-5, 7: that; rank 6: this"."""
        return "; ".join(self.lines())

    def lines(self) -> list[str]:
        """In words, one line for each text: "ranks 0-5, 7: that"."""
        said = [(sorted(ranks), text) for text, ranks in self.ranks.items()]
        if self.untold:
            said.append((sorted(self.untold), "something else"))
        return [f"{ranks_in_words(ranks)}: {words}" for ranks, words in sorted(said)]


def different_calls(said: Statements) -> DisagreementError:
    """The error when the ranks are about to call different collectives; `said` has each rank's signature."""
    return DisagreementError(
        with_details("the ranks called different collectives; make every rank issue the same ones", *said.lines())
    )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """In words: "rank 3", "ranks 0, 1, 2", or "ranks 0-16, 18-9999" where more than three follow one another.

    Args:
        ranks: ascending.
    """
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in _shown(runs(ranks))]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(parts)}"


def runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of neighbours: [(0, 2), (4, 4)] for 0, 1, 2, 4.

    Args:
        ranks: ascending.
    """
    found: list[tuple[int, int]] = []
    for rank in ranks:
        first = found.pop()[0] if found and found[-1][1] == rank - 1 else rank
        found.append((first, rank))
    return found


def ranks_of(found: Iterable[Sequence[int]]) -> Iterator[int]:
    """The ranks of such runs."""
    for first, last in found:
        yield from range(first, last + 1)


def _shown(found: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Short runs as single ranks."""
    for first, last in found:
        if last - first < _LISTED_RUN:
            yield from ((rank, rank) for rank in range(first, last + 1))
        else:
            yield first, last
