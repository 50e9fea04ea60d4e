"""Which parameters are synchronised together, and when. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.collectives import InvalidArgumentError


def balanced_fragments(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Distribute items over `count` fragments of about the same size.

    The largest item comes first, and each item goes to the smallest fragment so far; among equal ones to the first. (Longest
    processing time first, Graham 1969: no fragment is larger than 4/3 of the largest one in the best division.) Streaming
    DiLoCo takes every n-th block of a transformer instead. These blocks have one size, so the bytes are the same.

    Args:
        sizes: of the items; 0 or above.
        count: 1 or above.

    Returns:
        The items' indices, ascending in each fragment. No fragment is empty.

    Raises:
        InvalidArgumentError: there are fewer items than fragments.
    """
    if not 1 <= count <= len(sizes):
        raise InvalidArgumentError(f"expected 1 to {len(sizes)} fragments, one parameter in each at least, found {count}")
    fragments: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, 0)] * count  # bytes, then items: the second number spreads parameters without elements, too
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        number = min(range(count), key=lambda number: filled[number])
        fragments[number].append(index)
        filled[number] = filled[number][0] + sizes[index], filled[number][1] + 1
    return [sorted(fragment) for fragment in fragments]


def starts_at(step: int, fragment: int, fragments: int, sync_every: int) -> bool:
    """Whether the average of a fragment starts after this step (counted from 1).

    Each fragment has its turn every `sync_every` steps, and the turns of the fragments are spread evenly over these steps. A
    single fragment starts at steps `sync_every`, 2 `sync_every`, ...
    """
    turn = sync_every * (fragment + 1) // fragments
    return step % sync_every == turn % sync_every
