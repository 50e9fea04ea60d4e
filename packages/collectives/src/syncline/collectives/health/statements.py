"""Show the texts of many ranks in few words: list ranks with the same text together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from ..errors import DisagreementError, with_details

MOST_TOLD = 8  # the largest number of different texts in a message
_LISTED_RUN = 3  # runs of up to this many ranks are listed one by one


class Statements:
    """Texts, each with the ranks that gave it. Only the first text of each rank is kept.

    Attributes:
        ranks: for each text its ranks.
        untold: ranks whose text is not in `ranks`, because it did not fit into a message.
        heard: all ranks of `ranks` and `untold`.
    """

    def __init__(self) -> None:
        self.ranks: dict[str, list[int]] = {}
        self.untold: set[int] = set()
        self.heard: set[int] = set()

    @classmethod
    def of(cls, texts: Sequence[str]) -> Statements:
        """Return statements in which rank r has given `texts[r]`."""
        said = cls()
        for rank, text in enumerate(texts):
            said.add(text, [rank])
        return said

    def add(self, text: str, ranks: Iterable[int]) -> None:
        """Add the text that each of these ranks has given."""
        # The first text of a rank counts, but an unknown text may still become known.
        new = [rank for rank in ranks if rank not in self.heard or rank in self.untold]
        if new:
            self.heard.update(new)
            self.untold.difference_update(new)
            self.ranks.setdefault(text, []).extend(new)

    def packed(self, most_told: int | None = MOST_TOLD) -> str:
        """Return, as one text for `add_packed`, the most frequent texts with their ranks, and the ranks of all other texts.

        Args:
            most_told: how many texts to return at most; None: all.
        """
        texts = sorted(self.ranks, key=lambda text: -len(self.ranks[text]))
        told = [(text, runs(sorted(self.ranks[text]))) for text in texts[:most_told]]
        # Texts that do not fit: the receiver gets only the ranks.
        rest = self.untold.union(*(self.ranks[text] for text in texts[len(told) :]))
        return json.dumps({"told": told, "untold": runs(sorted(rest))})

    def add_packed(self, text: str) -> None:
        """Add the statements from another object's `packed`."""
        said = json.loads(text)
        for line, told in said["told"]:
            self.add(line, ranks_of(told))
        self.untold.update(rank for rank in ranks_of(said["untold"]) if rank not in self.heard)
        self.heard.update(self.untold)

    def in_words(self) -> str:
        """Return all texts in words: "ranks 0-5, 7: all_reduce; rank 6: barrier"."""
        return "; ".join(self.lines())

    def lines(self) -> list[str]:
        """Return all texts in words, one line for each text: "ranks 0-5, 7: all_reduce"."""
        said = [(sorted(ranks), text) for text, ranks in self.ranks.items()]
        if self.untold:
            said.append((sorted(self.untold), "something else"))
        return [f"{ranks_in_words(ranks)}: {words}" for ranks, words in sorted(said)]


def different_calls(said: Statements) -> DisagreementError:
    """Return the error for ranks that are about to call different collectives. `said` has each rank's call."""
    return DisagreementError(
        with_details("the ranks called different collectives; make every rank issue the same ones", *said.lines())
    )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 0, 1, 2", or, if a run has more than three ranks, "ranks 0-16, 18-9999".

    Args:
        ranks: the ranks, ascending.
    """
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in _shown(runs(ranks))]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(parts)}"


def runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last rank of each run of consecutive ranks: [(0, 2), (4, 4)] for 0, 1, 2, 4.

    Args:
        ranks: the ranks, ascending.
    """
    found: list[tuple[int, int]] = []
    for rank in ranks:
        first = found.pop()[0] if found and found[-1][1] == rank - 1 else rank
        found.append((first, rank))
    return found


def ranks_of(found: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yield all ranks of these runs of ranks. A run is a pair, as in the result of the function `runs`."""
    for first, last in found:
        yield from range(first, last + 1)


def _shown(found: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for first, last in found:
        if last - first < _LISTED_RUN:
            yield from ((rank, rank) for rank in range(first, last + 1))
        else:
            yield first, last
