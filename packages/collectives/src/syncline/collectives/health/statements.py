"""Show the texts of many ranks in a short form: ranks with the same text share one line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from ..errors import DisagreementError, with_details

MOST_TOLD = 8  # the largest number of different texts in a message
_LISTED_RUN = 3  # runs of up to this many ranks are listed one by one


class Statements:
    """The texts of ranks, and for each text its ranks. Only the first text of a rank counts.

    Attributes:
        ranks: for each text, its ranks.
        untold: ranks whose text is unknown, because it did not fit into a message.
        heard: all ranks in `ranks` and in `untold`.
    """

    def __init__(self) -> None:
        self.ranks: dict[str, list[int]] = {}
        self.untold: set[int] = set()
        self.heard: set[int] = set()

    @classmethod
    def of(cls, texts: Sequence[str]) -> Statements:
        """Make an object in which `texts[r]` is the text of rank r."""
        said = cls()
        for rank, text in enumerate(texts):
            said.add(text, [rank])
        return said

    def add(self, text: str, ranks: Iterable[int]) -> None:
        """Add a text and the ranks with this text."""
        # The first text of a rank counts, but an unknown text may still become known.
        new = [rank for rank in ranks if rank not in self.heard or rank in self.untold]
        if new:
            self.heard.update(new)
            self.untold.difference_update(new)
            self.ranks.setdefault(text, []).extend(new)

    def packed(self, most_told: int | None = MOST_TOLD) -> str:
        """Return the content as one text, which `add_packed` can read.

        The result has only the `most_told` most frequent texts. For all other texts, it has only the ranks. None: all texts.
        """
        texts = sorted(self.ranks, key=lambda text: -len(self.ranks[text]))
        told = [(text, runs(sorted(self.ranks[text]))) for text in texts[:most_told]]
        # Texts that do not fit: the receiver gets only the ranks.
        rest = self.untold.union(*(self.ranks[text] for text in texts[len(told) :]))
        return json.dumps({"told": told, "untold": runs(sorted(rest))})

    def add_packed(self, text: str) -> None:
        """Add the content of another object, from a text that its method `packed` returned."""
        said = json.loads(text)
        for line, told in said["told"]:
            self.add(line, ranks_of(told))
        self.untold.update(rank for rank in ranks_of(said["untold"]) if rank not in self.heard)
        self.heard.update(self.untold)

    def in_words(self) -> str:
        """Return all texts with their ranks, in one line: "ranks 0-5, 7: all_reduce; rank 6: barrier"."""
        return "; ".join(self.lines())

    def lines(self) -> list[str]:
        """Return one line for each text, with its ranks: "ranks 0-5, 7: all_reduce"."""
        said = [(sorted(ranks), text) for text, ranks in self.ranks.items()]
        if self.untold:
            said.append((sorted(self.untold), "something else"))
        return [f"{ranks_in_words(ranks)}: {words}" for ranks, words in sorted(said)]


def different_calls(said: Statements) -> DisagreementError:
    """Return the error for ranks that call different collectives. `said` has the call of each rank."""
    return DisagreementError(
        with_details("the ranks called different collectives; make every rank issue the same ones", *said.lines())
    )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return a text such as "rank 3" or "ranks 0, 1, 2". More than three consecutive ranks become a range: "ranks 0-16"."""
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in _shown(runs(ranks))]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(parts)}"


def runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last rank of each range of consecutive ranks. For 0, 1, 2, 4 this is [(0, 2), (4, 4)]."""
    found: list[tuple[int, int]] = []
    for rank in ranks:
        first = found.pop()[0] if found and found[-1][1] == rank - 1 else rank
        found.append((first, rank))
    return found


def ranks_of(found: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yield all ranks of these ranges. A range is a pair, as in the result of `runs`."""
    for first, last in found:
        yield from range(first, last + 1)


def _shown(found: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for first, last in found:
        if last - first < _LISTED_RUN:
            yield from ((rank, rank) for rank in range(first, last + 1))
        else:
            yield first, last
