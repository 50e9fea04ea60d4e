"""Divide parameters into DiLoCo's fragments, and decide when each fragment is synchronised."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.collectives import InvalidArgumentError


def balanced_fragments(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Distribute items over `count` fragments of about the same size. Return the indices of each fragment's items, in order.

    No fragment is empty. The items are placed from the largest to the smallest, each in the smallest fragment so far.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969 (longest processing time first). The largest fragment is
    at most 4/3 of the largest fragment of the best division.

    Raises:
        InvalidArgumentError: there are fewer items than fragments, or `count` is below 1.
    """
    if not 1 <= count <= len(sizes):
        raise InvalidArgumentError(f"expected 1 to {len(sizes)} fragments, one parameter in each at least, found {count}")
    fragments: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, 0)] * count  # bytes and items; parameters without elements count only as items
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        number = min(range(count), key=lambda number: filled[number])
        fragments[number].append(index)
        filled[number] = filled[number][0] + sizes[index], filled[number][1] + 1
    return [sorted(fragment) for fragment in fragments]


def starts_at(step: int, fragment: int, fragments: int, sync_every: int) -> bool:
    """Whether the average of fragment `fragment` (counted from 0) starts after step `step` (counted from 1).

    Each fragment starts once every `sync_every` steps. The starts of all fragments are spread evenly.
    """
    turn = sync_every * (fragment + 1) // fragments
    return step % sync_every == turn % sync_every
